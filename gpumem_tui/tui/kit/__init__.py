"""The parts of every screen: rows of styled text, lists, bars, dialogues, themes, the terminal."""
