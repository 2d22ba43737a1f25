// A button that acts once for a click and repeatedly while it is held, by pointer, Space or Enter.

const CLICK = 350; // milliseconds; a longer press repeats

// `pace()` returns how often to act per second. Returns a function that ends the press.
export function pressAndHold(button, act, pace) {
  let timer = null;

  function begin() {
    if (timer !== null) return;
    button.classList.add("held");
    timer = setTimeout(() => {
      timer = setInterval(act, 1000 / pace());
    }, CLICK);
    act(); // last, because it may end the press
  }

  function end() {
    button.classList.remove("held");
    clearTimeout(timer); // clears an interval as well
    timer = null;
  }

  const presses = (key) => key.key === " " || key.key === "Enter";
  button.addEventListener("pointerdown", (press) => {
    if (press.button === 0) begin();
  });
  for (const left of ["pointerup", "pointercancel", "pointerleave", "blur"]) button.addEventListener(left, end);
  button.addEventListener("keydown", (key) => {
    if (!presses(key)) return;
    key.preventDefault();
    if (!key.repeat) begin();
  });
  button.addEventListener("keyup", (key) => {
    if (presses(key)) end();
  });
  // Screen readers and voice control click without a pointer or a key.
  button.addEventListener("click", (click) => {
    if (click.detail === 0 && timer === null) act();
  });
  button.addEventListener("contextmenu", (menu) => menu.preventDefault()); // a long press on a phone
  document.addEventListener("visibilitychange", end);
  return end;
}
