"use strict";
// Every text comes as text: nothing that a site or a server says is ever read as HTML.
const token = new URLSearchParams(location.search).get("token") || "";
const at = (id) => document.getElementById(id);
const put = (id, lines) => {
  const box = at(id);
  if (!box) return;
  box.replaceChildren(...lines.map(([kind, text, light]) => {
    const one = document.createElement(kind);
    one.textContent = text;
    if (light) one.className = light;
    return one;
  }));
};
const show = (view) => {
  at("when").textContent = "as of " + new Date().toLocaleTimeString();
  put("lead", view.lead.map((one) => ["p", one, "lead"]));
  put("alarms", view.alarms.map((one) => ["p", one, "badge"]));
  put("lights", view.lights.map((one) => ["li", one.text, "light " + one.state]));
  put("facts", view.facts.map((one) => ["li", one]));
  put("log", view.log.map((one) => ["li", one]));
  const ask = at("ask");
  if (ask) {
    ask.hidden = !view.pending.length;
    at("pending").dataset.plan = view.plan;
    put("pending", view.pending.map((one) => ["p", one]));
  }
  const report = at("report");
  report.hidden = !view.report;
};
const say = (text) => { const box = at("answer"); if (box) box.textContent = text; };
const send = async (words) => {
  const reply = await fetch("consent?token=" + encodeURIComponent(token), {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(words),
  });
  say((await reply.json()).detail);
};
for (const [id, more] of [["accept", {}], ["refuse", { refuse: true }]]) {
  const button = at(id);
  if (button) button.addEventListener("click", () => send({
    by: at("by").value, secret: at("secret").value, plan: at("pending").dataset.plan, days: Number(at("days").value), reason: at("reason").value, ...more,
  }));
}
at("report").href = "report?token=" + encodeURIComponent(token);
const stream = new EventSource("events?token=" + encodeURIComponent(token));
stream.onmessage = (message) => show(JSON.parse(message.data));
stream.onerror = () => { at("when").textContent = "the page is no longer told anything; is `fedvlm deploy watch` running?"; };
