// Set the theme before the first paint: the user's choice on this site, or the system's preference. This is a classic script in <head>.
(() => {
  const chosen = () => {
    try { return localStorage.getItem("theme"); } catch { return null; }
  };
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => { document.documentElement.dataset.theme = chosen() ?? (system.matches ? "dark" : "light"); };
  system.addEventListener("change", apply);
  apply();
  globalThis.toggleTheme = () => {
    const other = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("theme", other); } catch { /* private mode: the choice lasts until the page is closed */ }
    document.documentElement.dataset.theme = other;
  };
})();
