// The colors of the page: light, dark, or those of the system.

export function themeName() {
  return { light: "colors: light", dark: "colors: dark" }[document.documentElement.dataset.theme] ?? "colors: system";
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  try {
    localStorage.setItem("theme", theme ?? "");
  } catch { /* a file may have no storage */ }
}

export function nextTheme() {
  setTheme(
    { light: "dark", dark: null }[document.documentElement.dataset.theme] ??
      (document.documentElement.dataset.theme ? null : "light"),
  );
}

try {
  if (localStorage.getItem("theme")) document.documentElement.dataset.theme = localStorage.getItem("theme");
} catch { /* no storage */ }
