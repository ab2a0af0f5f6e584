"use strict";
// The page comes from our own server, whose template escapes every text; nothing else is ever read as HTML.
const query = location.search;
const refresh = async (id) => {
  const reply = await fetch(location.pathname + query);
  if (!reply.ok) throw new Error("status " + reply.status);
  const page = new DOMParser().parseFromString(await reply.text(), "text/html");
  const focused = document.activeElement ? document.activeElement.id : "";
  document.getElementById(id).replaceChildren(...page.getElementById(id).childNodes);
  document.querySelector("nav").replaceChildren(...page.querySelector("nav").childNodes);
  if (focused && document.getElementById(focused)) document.getElementById(focused).focus();
};
const live = document.getElementById("live");
if (live) {
  const when = document.getElementById("when");
  const stream = new EventSource(live.dataset.live);
  const lost = () => { when.textContent = "this page no longer gets news; is `fedvlm deploy watch` running?"; };
  stream.onmessage = () => refresh("live").then(() => { when.textContent = "as of " + new Date().toLocaleTimeString(); }, lost);
  stream.onerror = lost;
}
const send = async (form, answer) => {
  const fields = Object.fromEntries(new FormData(form));
  const body = { ...fields, days: Number(fields.days), plan: form.dataset.plan, refuse: answer === "refuse" };
  const reply = await fetch("consent" + query, {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
  });
  document.getElementById("answer").textContent = (await reply.json()).detail;
  form.elements.secret.value = "";
  if (reply.ok) await refresh("requests");
};
document.addEventListener("submit", (event) => {
  event.preventDefault();
  send(event.target, event.submitter ? event.submitter.value : "accept");
});
