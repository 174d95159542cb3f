// Small words for making elements. Text always goes in as text, never as HTML.

/** Make an element. attributes: `class`, `dataset` and `on` (listeners) are understood, the rest
 * are set as they are; false and null leave one out. children: nodes or text. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false || value === undefined) continue;
    if (name === "dataset") Object.assign(element.dataset, value);
    else if (name === "on") {
      for (const [event, listener] of Object.entries(value)) {
        element.addEventListener(event, listener);
      }
    } else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** Set an element's text, if it is another: screen readers and selections stay undisturbed. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
