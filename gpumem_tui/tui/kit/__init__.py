"""What every screen is made of: rows of styled text, lists, bars, dialogues, themes, the terminal."""
