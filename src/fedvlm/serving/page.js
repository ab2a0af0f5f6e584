"use strict";
// Every text comes as text: nothing that the server says is ever read as HTML.
const at = (id) => document.getElementById(id);
const base64 = async (file) => {
  const bytes = new Uint8Array(await file.arrayBuffer());
  let text = "";
  for (let start = 0; start < bytes.length; start += 32768) {
    text += String.fromCharCode(...bytes.subarray(start, start + 32768));
  }
  return btoa(text);
};
const draw = async (file, heatmap) => {
  const canvas = at("image");
  let picture;
  try { picture = await createImageBitmap(file); } catch { canvas.hidden = true; return; }
  const scale = 320 / Math.max(picture.width, picture.height, 1);
  canvas.width = Math.max(1, picture.width * scale);
  canvas.height = Math.max(1, picture.height * scale);
  canvas.hidden = false;
  const pen = canvas.getContext("2d");
  pen.drawImage(picture, 0, 0, canvas.width, canvas.height);
  if (!heatmap) return;
  const grid = heatmap.local, all = grid.flat(), low = Math.min(...all), high = Math.max(...all);
  const height = canvas.height / grid.length, width = canvas.width / grid[0].length;
  grid.forEach((line, row) => line.forEach((value, column) => {
    pen.fillStyle = `rgba(220, 60, 0, ${0.7 * (value - low) / (high - low || 1)})`;
    pen.fillRect(column * width, row * height, width, height);
  }));
};
const show = (reply) => {
  const set = reply.prediction_set;
  at("status").textContent = reply.rejected
    ? "Unlike anything this site has seen; the classes below mean little."
    : reply.class + (set ? "; the set of classes is " + (set.join(", ") || "empty") : "");
  at("rows").replaceChildren(...Object.entries(reply.probabilities).map(([name, value]) => {
    const line = document.createElement("tr");
    for (const text of [name, (100 * value).toFixed(1) + " %"]) {
      const cell = document.createElement("td");
      cell.textContent = text;
      line.append(cell);
    }
    return line;
  }));
  at("table").hidden = false;
};
const send = async (file) => {
  if (!file) return;
  at("status").textContent = "predicting " + file.name;
  at("table").hidden = true;
  const body = { image: await base64(file), heatmap: true };
  if (at("coverage").value) body.coverage = Number(at("coverage").value);
  const headers = { "content-type": "application/json" };
  if (at("token").value) headers.authorization = "Bearer " + at("token").value;
  try {
    const answer = await fetch("predict", { method: "POST", headers, body: JSON.stringify(body) });
    const reply = await answer.json();
    await draw(file, reply.heatmap);
    if (answer.ok) show(reply); else at("status").textContent = reply.detail;
  } catch {
    at("status").textContent = "the server does not answer";
  }
};
const drop = at("drop");
for (const kind of ["dragenter", "dragover"]) {
  drop.addEventListener(kind, (event) => { event.preventDefault(); drop.classList.add("over"); });
}
drop.addEventListener("dragleave", () => drop.classList.remove("over"));
drop.addEventListener("drop", (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  send(event.dataTransfer.files[0]);
});
at("file").addEventListener("change", (event) => send(event.target.files[0]));
