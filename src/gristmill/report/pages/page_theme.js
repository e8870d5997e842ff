// Light or dark: as the address asks, else as the reader's system is, until the button is pressed.

export function followTheme() {
  const { documentElement } = document;
  const button = document.getElementById("theme");
  const asked = new URLSearchParams(location.search).get("theme");
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const use = (name) => {
    documentElement.dataset.theme = name;
    button.textContent = name === "dark" ? "Light" : "Dark";
  };
  button.setAttribute("aria-label", "Switch between light and dark");
  button.addEventListener("click", () =>
    use(documentElement.dataset.theme === "dark" ? "light" : "dark"));
  if (!asked) prefersDark.addEventListener("change", (event) => use(event.matches ? "dark" : "light"));
  use(documentElement.dataset.theme);
}
