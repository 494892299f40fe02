// Keys go to the terminal without a click first. Runs after the listener that textual.js has set, which makes it.
const focus = () => document.querySelector(".xterm-helper-textarea")?.focus();
window.addEventListener("load", focus);
window.addEventListener("focus", focus);
