// Keys go to the terminal without a click first. Runs after the listener that textual.js has set, which makes it.
const focus = () => document.querySelector(".xterm-helper-textarea")?.focus();
window.addEventListener("load", focus);
window.addEventListener("focus", focus);

// Ctrl-C where something is selected: the browser copies it, the terminal is not told. xterm.js takes over a copy, even
// one that only asks, where it has a selection. Without one the program is told, and copies its whole screen.
const hasSelection = () => {
  const asked = new ClipboardEvent("copy", { bubbles: true, cancelable: true });
  return document.querySelector(".xterm")?.dispatchEvent(asked) === false;
};
window.addEventListener("keydown", (event) => {
  const isCopy = event.ctrlKey && !event.altKey && !event.metaKey && !event.shiftKey && event.key.toLowerCase() === "c";
  if (isCopy && hasSelection()) event.stopImmediatePropagation();
}, { capture: true });
