// Runs before anything is painted, so that a dark page does not flash white. Not a module: modules
// wait for the whole document.
"use strict";
try {
  const theme = localStorage.getItem("gristmill.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage may be forbidden; the colours are then those of the system.
}
