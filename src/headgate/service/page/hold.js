// A button that does something once for a click and again and again while it is held, by pointer, Space or Enter.

const CLICK = 350; // milliseconds; who holds longer means more than one

// `pace()` says how often a second. Returns a function that lets go.
export function holdable(button, act, pace) {
  let timer = null;

  function begin() {
    if (timer !== null) return;
    button.classList.add("held");
    timer = setTimeout(() => {
      timer = setInterval(act, 1000 / pace());
    }, CLICK);
    act(); // last, because it may let go
  }

  function end() {
    button.classList.remove("held");
    clearTimeout(timer); // HTML has one kind of id for both
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
