// Before the first paint, so that a page in the dark never flashes white.
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem('posttrain-theme'); } catch { /* storage is blocked: the system's theme holds */ }
  const dark = chosen ? chosen === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  document.documentElement.dataset.theme = dark ? 'dark' : 'light';
})();
