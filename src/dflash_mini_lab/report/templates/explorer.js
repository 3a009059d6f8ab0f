// The mechanism explorer: shows one recorded round at a time. All text is in the page already; without this script it is a list.
"use strict";
const box = document.querySelector(".explorer");
const one = (selector) => box.querySelector(selector);
const select = one("select"), stage = one(".stage"), said = one(".said"), count = one(".count"), play = one("[data-play]");
const steps = [...box.querySelectorAll("[data-step]")];
const panels = [...box.querySelectorAll(".recorded")];
const rounds = new Map(panels.map((panel) => [panel, [...panel.querySelectorAll(".round")]]));
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const LINK = /^#explorer-(\d\d(?:-\d\d)?)(?:-round-(\d+))?$/; // a method, or two side by side; the first round where none is named
const PACE = 3000; // milliseconds a round while playing: long enough to read its sentence
let at = 0, timer = 0;

function chosen() {
  return select.value.split(" ").map((key) => panels.find((panel) => panel.dataset.key === key));
}

function last() {
  return Math.max(...chosen().map((panel) => rounds.get(panel).length)) - 1;
}

function show(aloud = true) {
  const now = chosen();
  at = Math.max(0, Math.min(at, last()));
  for (const panel of panels) {
    panel.hidden = !now.includes(panel);
    panel.open = true;
    rounds.get(panel).forEach((round, index) => { round.hidden = index !== at; });
    panel.querySelector(".over").hidden = at < rounds.get(panel).length;
  }
  stage.classList.toggle("two", now.length > 1);
  for (const why of box.querySelectorAll(".why")) why.hidden = why.dataset.pair !== select.value;
  count.textContent = `Round ${at + 1} of ${last() + 1}`;
  steps[0].setAttribute("aria-disabled", at === 0); // `disabled` would take the focus away
  steps[1].setAttribute("aria-disabled", at === last());
  if (!aloud) return;
  const link = `#explorer-${select.value.replace(" ", "-")}-round-${at + 1}`;
  if (link !== location.hash) history.replaceState(null, "", link);
  said.textContent = `Round ${at + 1}. ` + now.map((panel) => {
    const round = rounds.get(panel)[at];
    const words = round ? round.querySelector(".what").textContent : "its recording has ended.";
    return now.length > 1 ? `${panel.querySelector("summary b").textContent}: ${words}` : words;
  }).join(" ");
}

function stop() {
  clearInterval(timer);
  timer = 0;
  play.textContent = "Play";
}

function go(to) {
  at = to;
  show();
  if (at === last()) stop();
}

function follow(aloud) {
  const [, keys = "", round = 1] = LINK.exec(location.hash) ?? [];
  const value = keys.replace("-", " ");
  if (![...select.options].some((option) => option.value === value)) return;
  stop();
  select.value = value;
  at = round - 1;
  show(aloud);
  box.scrollIntoView({ behavior: "instant" });
}

play.addEventListener("click", () => {
  if (timer) return stop();
  play.textContent = "Pause";
  timer = setInterval(() => go(at + 1), PACE);
  go(at === last() ? 0 : at + 1);
});
for (const step of steps) step.addEventListener("click", () => { stop(); go(at + Number(step.dataset.step)); });
select.addEventListener("change", () => { stop(); show(); });
box.addEventListener("keydown", (event) => {
  const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last() }[event.key];
  if (to === undefined || event.target === select || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  stop();
  go(to);
});
for (const summary of stage.querySelectorAll("summary")) {
  summary.tabIndex = -1;
  summary.addEventListener("click", (event) => event.preventDefault());
}
const still = () => { play.hidden = calm.matches; if (calm.matches) stop(); };
calm.addEventListener("change", still);
still();
box.classList.add("live");
stage.tabIndex = 0;
for (const part of [one(".controls"), said]) part.hidden = false;
show(false);
follow(false);
addEventListener("hashchange", () => follow(true));
