// Sets the theme before the first paint: what was chosen here, else what the system prefers. A classic script, in <head>.
(() => {
  const wanted = () => {
    try { return localStorage.getItem("theme"); } catch { return null; }
  };
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => { document.documentElement.dataset.theme = wanted() ?? (system.matches ? "dark" : "light"); };
  system.addEventListener("change", apply);
  apply();
  globalThis.toggleTheme = () => {
    const other = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("theme", other); } catch { /* private mode: until the page is left */ }
    document.documentElement.dataset.theme = other;
  };
})();
