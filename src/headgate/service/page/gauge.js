// What is left of a limit: a number, and a dot for each permit or a bar when there are too many.

import { byId, element, say } from "./dom.js";
import { count } from "./format.js";

const MOST_DOTS = 60;

export function showLeft(remaining, capacity) {
  say(byId("remaining"), count(remaining));
  say(byId("limit-text"), `of ${count(capacity)} left`);
  const pips = byId("pips");
  const dots = capacity <= MOST_DOTS;
  const wanted = dots ? capacity : 1;
  if (pips.children.length !== wanted || pips.classList.contains("bar") === dots) {
    pips.classList.toggle("bar", !dots);
    pips.replaceChildren(...Array.from({ length: wanted }, () => element("i")));
  }
  if (dots) [...pips.children].forEach((pip, place) => pip.classList.toggle("full", place < remaining));
  else pips.firstChild.style.width = `${(100 * remaining) / capacity}%`;
}

export function showNothing() {
  say(byId("remaining"), "–");
  say(byId("limit-text"), "of –");
  byId("pips").replaceChildren();
}
