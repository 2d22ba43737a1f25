// Make elements. Text always goes in as text: rule names and keys come from outside.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function shape(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Writing the same text again would make a screen reader say it again.
export function say(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

// A button that copies a text. The clipboard is absent on plain HTTP beyond this machine, and so is the button then.
export function copyButton(button, text) {
  button.hidden = !navigator.clipboard;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text());
    say(button, "Copied");
    setTimeout(() => say(button, "Copy"), 1500);
  });
}
