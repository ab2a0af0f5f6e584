"""The pages of reference/generated, made from the code; conf.py calls `write` before each build.

Run as a program it also writes the contract, the table of uploads and the appendix of results.
"""

import ast
import csv
import inspect
import io
import re
import tokenize
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import typer.main

from fedvlm.channel.settings import Channel
from fedvlm.cli import app
from fedvlm.core import OPTIONAL_PROTOCOLS, TRAIT_GROUPS, Schedule, StateBounded, Traits, make, methods, upload_sum
from fedvlm.core.schema import range_of
from fedvlm.data.clients import Clients
from fedvlm.deploy.messages import ERROR_MESSAGES
from fedvlm.deploy.site.policy import DEFAULT_METHODS, RULE_TEXTS, Policy
from fedvlm.evaluate.protocols import protocols
from fedvlm.report.lists import LISTS
from fedvlm.runner.settings import Settings
from fedvlm.testing import first_uploads, shorten, toy_world

# Of settings that many methods have and few explain.
COMMON = {
    "rounds": "rounds of a training; 0 is zero-shot",
    "head": "what the head starts from",
    "n_ctx": "context vectors of a prompt",
    "ctx_init": "what a prompt starts from",
}
PUBLIC = ("", ".core", ".parts", ".testing", ".data", ".encoders")
PUBLIC += (".evaluate.metrics", ".evaluate.protocols")


def comments(kind: type) -> dict[str, str]:
    """What a dataclass's source says beside or right above each of its fields."""
    descriptions = {field.name: field.metadata["doc"] for field in fields(Schedule)}
    for field in reversed([field for field in kind.__mro__ if "__annotations__" in vars(field)]):
        text = inspect.getsource(field)
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        notes = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
        [node] = ast.parse(text).body
        for part in (part for part in node.body if isinstance(part, ast.AnnAssign)):
            lines = [at for at in range(part.lineno, part.end_lineno + 1) if at in notes]
            above = part.lineno - 1
            while above in notes and not notes[above].line.partition("#")[0].strip():
                lines.insert(0, above)
                above -= 1
            words = " ".join(notes[at].string.lstrip("# ") for at in lines)
            descriptions[part.target.id] = words or descriptions.get(part.target.id, COMMON.get(part.target.id, ""))
    return descriptions


def cell(words: Any) -> str:
    return " ".join(str(words).replace("|", "\\|").split())


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    lines = [head, ["---"] * len(head), *([cell(value) for value in row] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def default(field: Field[Any]) -> str:
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if value is MISSING:
        return "must be given"
    plain = value is None or isinstance(value, bool | int | float | str | tuple | list | dict)
    return f"`{value!r}`" if plain else "see its table"


def describe_type(field: Field[Any]) -> str:
    kind = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    kind = kind.replace("typing.", "").replace("collections.abc.", "")
    span = str(range_of(field) or "")
    return f"`{kind}`" + (f", {span}" if span else "")


def settings(kind: type) -> list[str]:
    descriptions = comments(kind)
    rows = [
        (f"`{field.name}`", default(field), describe_type(field), descriptions.get(field.name, ""))
        for field in fields(kind)
    ]
    return table(("setting", "default", "takes", "symbol and meaning"), rows)


def own_words(thing: Any) -> str:
    """Its docstring, unless Python wrote it."""
    docstring = inspect.getdoc(thing) or ""
    made = inspect.isclass(thing) and docstring.startswith(f"{thing.__name__}(")
    return "" if made else docstring.replace("*", "\\*")


def paragraphs(thing: Any) -> list[str]:
    return [own_words(thing), ""]


def methods_page() -> list[str]:
    lines = [
        "# Methods and their settings",
        "",
        "Made from the classes; symbols are the papers'.",
        "",
    ]
    needs = {row["method"]: row["needs"] for row in LISTS["methods"]()}
    for name, kind in sorted(methods().items()):
        lines += [f"## {name}", "", *paragraphs(import_module(kind.__module__))]
        lines += [f"Asks of the encoder: {needs[name]}.", "", *settings(kind)]
    return lines


def listed(list_name: str, title: str, omitted: Sequence[str] = ()) -> list[str]:
    rows = LISTS[list_name]()
    head = [key for key, value in rows[0].items() if not isinstance(value, list) and key not in omitted]
    body = [[f"`{row[head[0]]}`", *(row[key] for key in head[1:])] for row in rows]
    return [f"# {title}", "", f"`fedvlm list {list_name}` prints the same.", "", *table(head, body)]


def protocols_page() -> list[str]:
    lines = ["# Protocols", ""]
    for name, kind in sorted(protocols().items()):
        knobs = settings(kind) if fields(kind) else []
        lines += [f"## {name}", "", kind.summary[0].upper() + kind.summary[1:] + ".", "", *knobs]
    return lines


def settings_page() -> list[str]:
    lines = ["# Settings of a run, clients and channel, with their types", ""]
    for title, kind in (("A run", Settings), ("clients", Clients), ("channel", Channel)):
        lines += [f"## {title}", "", *paragraphs(kind), *settings(kind)]
    return lines


def commands(command: Any, name: str) -> list[str]:
    """A command's help, and that of those below it."""
    context = typer.Context(command, info_name=name, max_content_width=100, terminal_width=100)
    lines = [f"## {name}", "", "```text", command.get_help(context), "```", ""]
    for word, below in sorted(getattr(command, "commands", {}).items()):
        lines += commands(below, f"{name} {word}")
    return lines


def command_page() -> list[str]:
    return ["# Command line", "", *commands(typer.main.get_command(app), "fedvlm")]


FULL_MODULES = ("", ".testing")  # whose names have full docstrings


def public_names(module_name: str) -> list[tuple[str, Any]]:
    """The names of a public module; once imported, the package fedvlm.methods hides the function."""
    module = import_module(f"fedvlm{module_name}")
    found = [(name, getattr(module, name)) for name in sorted(module.__all__, key=str.lower)]
    return [(name, methods if inspect.ismodule(value) else value) for name, value in found]


def api_page() -> list[str]:
    lines = [
        "# Python API",
        "",
        "For Python users. Made from docstrings. [The public API](../api.md) says what stays.",
        "",
    ]
    for part in PUBLIC:
        lines += [f"## fedvlm{part}", ""]
        if part in FULL_MODULES:
            for name, value in public_names(part):
                lines += describe(f"fedvlm{part}.{name}", value)
        else:
            rows = [(f"`{name}{call(value)}`", doc(value)) for name, value in public_names(part)]
            lines += table(("name", "what it is"), rows)
    return lines


def describe(title: str, thing: Any, level: int = 3) -> list[str]:
    """A name with its signature, parameters, result and example."""
    text = inspect.getdoc(thing) or ""
    sections = re.split(r"(?m)^(Args|Returns|Example):\n", text)
    lines = [
        f"{'#' * level} {title}{'()' if inspect.isfunction(thing) else ''}",
        "",
        sections[0].replace("*", "\\*"),
        "",
    ]
    for kind, body in zip(sections[1::2], sections[2::2], strict=True):
        body = inspect.cleandoc(body)
        if kind == "Args":
            entries = [line.partition(": ") for line in re.sub(r"\n +", " ", body).splitlines()]
            lines += table(
                ("parameter", "default", "what it is"), [(f"`{n}`", default_of(thing, n), d) for n, _, d in entries]
            )
        elif kind == "Returns":
            lines += ["**Returns:** " + " ".join(body.split()), ""]
        else:
            lines += ["```python", body.replace("  # doctest: +SKIP", ""), "```", ""]
    if inspect.isclass(thing):
        members = [(name, member) for name, member in vars(thing).items() if not name.startswith("_")]
        functions = [
            (f"`{name}{call(f)}`", doc(f))
            for name, m in members
            for f in [getattr(m, "__func__", m)]
            if inspect.isfunction(f)
        ]
        lines += table(("method", "what it does"), functions) if functions else []
    return lines


def default_of(thing: Any, name: str) -> str:
    parameter = inspect.signature(thing).parameters.get(name)
    if parameter is None or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
        return "any"
    return "must be given" if parameter.default is parameter.empty else f"`{parameter.default!r}`"


def call(thing: Any) -> str:
    """The names of what a function takes; annotations are in the source."""
    if not inspect.isfunction(thing):
        return ""
    return f"({', '.join(name for name in inspect.signature(thing).parameters if name not in ('self', 'cls'))})"


def doc(thing: Any) -> str:
    """The first paragraph of what a name says of itself; constants say their value."""
    if (inspect.isclass(thing) or inspect.isfunction(thing)) and "fedvlm" in thing.__module__:
        return own_words(thing).split("\n\n")[0]
    if isinstance(thing, tuple):
        return ", ".join(f"`{getattr(entry, '__name__', entry)}`" for entry in thing)
    return f"`{thing}`" if isinstance(thing, int) else f"a {type(thing).__name__}"


CONTRACT_OPENING = """# What a method may say

Beside its name, its settings and the six verbs ([concepts](../explanation/concepts.md)). This page
is made from `fedvlm.core`; what is not on it, nothing reads. `register` refuses a name that is
nearly one of these.
"""


def contract_page() -> str:
    """Three tables: traits, settings that engines read, and optional verbs."""
    traits = [
        (f"`{name}`", contract_value(field.default), field.metadata["doc"])
        for group, traits_class in {"": Traits, **TRAIT_GROUPS}.items()
        for field in fields(traits_class)
        for name in [f"{group}.{field.name}" if group else field.name]
        if name not in TRAIT_GROUPS
    ]
    settings = [
        (f"`{field.name}`", contract_value(field.default), str(range_of(field) or ""), field.metadata["doc"])
        for field in fields(Schedule)
    ]
    verbs = [(describe_protocol(kind), (inspect.getdoc(kind) or "").replace("\n", " ")) for kind in OPTIONAL_PROTOCOLS]
    return "\n".join(
        [
            CONTRACT_OPENING,
            "## Traits\n",
            f"{' '.join((inspect.getdoc(Traits) or '').split())}\n",
            *contract_table(("trait", "if left out", "what it says"), traits),
            "\n## Settings that engines and parts read\n",
            "A method with a `loss` has the first three.\n",
            *contract_table(("setting", "if left out", "it takes", "what it is"), settings),
            "\n## Optional verbs\n",
            "A name without brackets is a setting that goes with the verb.\n",
            *contract_table(("verb", "what it gives"), verbs),
            "",
        ]
    )


def contract_value(default: Any) -> str:
    return "-" if default is None or default == frozenset() else f"`{default}`"


def describe_protocol(kind: type) -> str:
    """What a protocol asks for: verbs with their arguments, settings by name."""
    members = [(name, member) for name, member in vars(kind).items() if not name.startswith("_")]
    verbs = [
        (name, list(inspect.signature(member).parameters)[1:]) for name, member in members if inspect.isfunction(member)
    ]
    signatures = [f"`{name}({', '.join(words)})`" for name, words in verbs]
    return ", ".join(signatures + [f"`{name}`" for name, member in members if isinstance(member, property)])


def contract_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [head, ("---",) * len(head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


# Kinds of uploads, by names of tensors in them; security/privacy.md says what each can give away.
UPLOAD_KINDS = {
    "class statistics": "sums|prototypes|variances",
    "second moments": "gram|second|moments",
    "gradients": "gradient|variate",
    "curvature": "precisions|tall",
    "weights": "skew|map|mask|model|down",
    "head": r"\bhead\b",
    "prompt": r"\bprompt\b|precisions",
}


def uploads_table() -> str:
    """One row for each method, from its first upload in a toy federation and its traits."""
    rows = []
    for name in sorted(methods()):
        method = shorten(make(name))
        world = toy_world(method)
        upload = next(iter(first_uploads(world)[1].values()))
        names = ", ".join(f"`{tensor}`" for tensor in upload)
        if len(upload) > 6:
            names = f"{len(upload)} weights, as `{next(iter(upload))}`"
        kinds = ", ".join(kind for kind, pattern in UPLOAD_KINDS.items() if re.search(pattern, " ".join(upload)))
        has_minimum = method.traits.classes.min_class_samples is not None
        total = "sum" if isinstance(method, StateBounded) else "no"  # `check_verified` refuses the others
        summed = {None: "no", "total": total}.get(upload_sum(method), "mean") if upload else "-"
        if method.traits.privacy.centralised:
            kinds = "not federated: all samples in one place"
        rows.append((f"`{name}`", names or "nothing", kinds or "-", "yes" if has_minimum else "-", summed))
    head = ("method", "first upload", "kinds", "small classes suppressed", "verified")
    return "\n".join(table(head, rows))


def write_uploads(page: Path) -> None:
    page.write_text(with_uploads(page.read_text(encoding="utf-8"), uploads_table()), encoding="utf-8")


def with_uploads(text: str, made: str) -> str:
    """A page with the table between its marks."""
    return re.sub(r"(?s)(<!-- uploads -->\n).*?(<!-- uploads end -->)", lambda m: f"{m[1]}\n{made}\n{m[2]}", text)


def policy_page() -> list[str]:
    lines = ["# A site's policy and what it answers", "", "For people at a site. Made from the code.", ""]
    lines += ["## Rules of policy.toml", "", f"`deploy init` allows these methods: {', '.join(DEFAULT_METHODS)}.", ""]
    kinds = {field.name: field for field in fields(Policy)}
    rules = [
        (f"`{name}`", "the usual ones" if name == "methods" else default(kinds[name]), *texts)
        for name, texts in RULE_TEXTS.items()
    ]
    lines += table(("rule", "as init writes it", "what it is", "why"), rules)
    lines += ["## Codes of errors", "", "A site reports a code and numbers; the server writes the sentence.", ""]
    return lines + table(
        ("code", "what the server reads"), [(f"`{code}`", text) for code, text in ERROR_MESSAGES.items()]
    )


APPENDIX_OPENING = """# Appendix: all tables of results

*For researchers who check a number. Each table has its command and the commit that brought it into the repository.
Pages by question are in [results](results.md).*

Accuracies are per cent, mean ± sample standard deviation over seeds (0, 1, 2 unless stated), last round. G is the
accuracy on a domain that nobody trained on, P on the clients' own domains, C on all.

`python docs/generate.py` writes this page. The figures of a section are CSV files in
[tables](tables/index.toml); `make tables` writes the tables of experiments.
"""


def appendix_page(old: str, folder: Path) -> str:
    """All sections of index.toml: tables of CSV files, and those of experiments as they stand on the old page."""
    experiments = {
        match[1]: match[0] for match in re.finditer(r"(?ms)^<!-- table: ([\w-]+)[^>]*-->$.*?^<!-- table ends -->$", old)
    }
    lines = [APPENDIX_OPENING]
    for section in tomllib.loads((folder / "index.toml").read_text(encoding="utf-8"))["section"]:
        lines += [f"## {section['title']}", "", f"{section['note']} Commit {', '.join(section['commits'])}.", ""]
        for name in section["tables"]:
            kind, _, experiment = name.partition(":")
            if kind == "experiment":
                empty = f"<!-- table: {experiment} -->\n\n<!-- table ends -->"
                lines += [experiments.get(experiment, empty), ""]
            else:
                with (folder / name).open(encoding="utf-8", newline="") as file:
                    head, *rows = csv.reader(file)
                lines += table(head, rows)
    return "\n".join(lines)


def write_appendix(papers: Path) -> None:
    page = papers / "appendix.md"
    page.write_text(appendix_page(page.read_text(encoding="utf-8"), papers / "tables"), encoding="utf-8")


PAGES: dict[str, Callable[[], list[str]]] = {
    "methods": methods_page,
    "encoders": lambda: listed("encoders", "Encoders"),
    "datasets": lambda: listed("datasets", "Data sets"),
    "experiments": lambda: listed("experiments", "Experiments"),
    "protocols": protocols_page,
    "settings": settings_page,
    "policy": policy_page,
    "command-line": command_page,
    "public-names": api_page,
}


def write(folder: Path) -> None:
    """All pages; one that has not changed is left as it is, and one no longer made is deleted."""
    folder.mkdir(exist_ok=True)
    for old in set(folder.glob("*.md")) - {folder / f"{name}.md" for name in PAGES}:
        old.unlink()
    for name, write_page in PAGES.items():
        text = "\n".join(write_page())
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":  # what is in the repository; the other pages are made when the documentation is built
    (Path(__file__).parent / "reference" / "contract.md").write_text(contract_page(), encoding="utf-8")
    write_uploads(Path(__file__).parent / "security" / "privacy.md")
    write_appendix(Path(__file__).parent / "papers")
