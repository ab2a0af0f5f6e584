"""Commands of the one-shot methods: a client that joins late, and sentences about the classes."""

from pathlib import Path
from typing import Annotated

import typer

from fedvlm.cli.data import Source, options
from fedvlm.cli.progress import progress


def join(
    run: Annotated[Path, typer.Argument(help="The directory of a finished run.")],
    data: Annotated[str, typer.Argument(help="The new client's images.")],
    out: Annotated[Path, typer.Option(help="Where its classifier goes.")],
    client: Annotated[str, typer.Option(help="What the client is called.")] = "new",
    source: Source = None,
    encoder: Annotated[str, typer.Option(help="Where the run's encoder is now.")] = "",
    access: Annotated[list[str] | None, typer.Option(help="key=value for the encoder, as token_file=FILE.")] = None,
    training: Annotated[str | None, typer.Option(help="Which training; the first if left out.")] = None,
    share: Annotated[float, typer.Option(help="Of the rows to learn from.")] = 0.8,
) -> None:
    """Give one more client its own classifier, without any other client taking part."""
    from fedvlm.classifier.export import ClassifierOrigin, save_with_card
    from fedvlm.classifier.late_join import embed_for_run
    from fedvlm.classifier.late_join import join as adapt
    from fedvlm.result import Result

    result = Result(run)
    with progress() as report:
        rows, notes = embed_for_run(result, data, options(source), encoder, options(access), report)
    for message in notes:
        typer.echo(message, err=True)
    done = adapt(result, rows, client, training=training, train_fraction=share)
    story = ClassifierOrigin(
        {**result.manifest, "data": rows.name, "rows": rows.fingerprint},
        f"joined {result.folder.name}",
        done.n_test_samples,
        round(done.accuracy * done.n_test_samples),
    )
    save_with_card(done.classifier, story, out)
    if not done.is_adapted:
        name = done.classifier.method.name
        typer.echo(f"{name} has no adaptation of its own: {client} gets what every unseen one does")
    typer.echo(
        f"{client}: {100 * done.accuracy:.2f} % of {done.n_test_samples} held-out rows "
        f"({100 * done.unseen_accuracy:.2f} % without adapting), learnt from {done.n_train_samples}; in {out}"
    )


def describe(
    data: Annotated[str, typer.Argument(help="`fedvlm list datasets`, or a path.")],
    model: Annotated[Path, typer.Option(help="Folder of a text-generation model.")],
    out: Annotated[Path, typer.Option(dir_okay=False, help="The JSON file of sentences by class.")],
    source: Source = None,
    about: Annotated[str, typer.Option(help="What the data are, in a few words.")] = "",
    questions: Annotated[int, typer.Option(help="How many the model asks itself.")] = 4,
) -> None:
    """Let a local language model describe the classes, for a run's `descriptions`."""
    import json

    from fedvlm.data.descriptions import load_writer
    from fedvlm.data.descriptions import write_descriptions as write
    from fedvlm.runner.load import open_data
    from fedvlm.storage.files import write_file as save

    dataset = open_data(data, options(source))
    topic = about or f"an image data set called {dataset.name}"
    with progress() as report:
        sentences = write(
            dataset.classes,
            topic,
            load_writer(model),
            questions,
            lambda done, total: report("describing", done, total),
        )
    save(out, (json.dumps(sentences, indent=1, ensure_ascii=False) + "\n").encode())
    silent = [name for name, class_sentences in sentences.items() if not class_sentences]
    typer.echo(
        f"{sum(map(len, sentences.values()))} sentences about {len(sentences)} classes are in {out}; "
        f"use them: --set descriptions={out}"
    )
    if silent:
        typer.echo(f"nothing was said of {', '.join(silent)}: the template stays alone", err=True)
