// Dark or light: what the system prefers, until the button says otherwise.
// Imports nothing.
// Invariant: the button says which of the two is shown, and `onChange` is called after each change.

const KEPT = "longfill-theme";

export function setUpTheme(button, onChange) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const show = () => {
    button.setAttribute("aria-pressed", String(isDark()));
    onChange();
  };
  const kept = localStorage.getItem(KEPT);
  if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    localStorage.setItem(KEPT, root.dataset.theme);
    show();
  });
  system.addEventListener("change", show);
  show();
}
