// Light, dark, or as the system has it. This module runs before the page is painted, so that it never flashes.

const KEY = "quire-theme";
const THEMES = ["system", "light", "dark"];

/** localStorage throws where the browser keeps nothing for pages. */
function kept(doing, otherwise) {
  try {
    return doing() ?? otherwise;
  } catch {
    return otherwise;
  }
}

const current = () => {
  const found = kept(() => localStorage.getItem(KEY), "system");
  return THEMES.includes(found) ? found : "system";
};

let theme = current();

function apply() {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

/** Have a button go from theme to theme. Its last child names the one that is on. */
export function themeButton(button) {
  const name = () => {
    button.lastElementChild.textContent = `Theme: ${theme}`;
    button.title = `Theme: ${theme}`;
  };
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    kept(() => (theme === "system" ? localStorage.removeItem(KEY) : localStorage.setItem(KEY, theme)));
    apply();
    name();
  });
  name();
}

apply();
