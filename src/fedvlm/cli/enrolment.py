"""Enrol sites: requests, admission, renewal, revocation and withdrawal."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedvlm.cli.deploy import Folder, Server, Site, deploy_app
from fedvlm.cli.options import examples

__all__ = ["deploy_app"]  # with these commands


@deploy_app.command(
    "join-request",
    rich_help_panel="Set up",
    epilog=examples("fedvlm deploy join-request north --name north --invitation invitation.json"),
)
def join_request(
    folder: Site,
    name: Annotated[str | None, typer.Option(help="Name of the site.")] = None,
    invitation: Annotated[Path | None, typer.Option(help="The server's invitation.json.")] = None,
) -> None:
    """Create a site's key and its request to join."""
    from fedvlm.deploy.identity.enrolment import create_join_request as ask

    _tell_request(ask(folder, invitation, name))


def _tell_request(request: Any) -> None:
    typer.echo(f"send {request.path} to the server; the private key stays at this site")
    typer.echo(f"fingerprint to read out to the server's operator: {request.fingerprint}")


@deploy_app.command(rich_help_panel="Set up", epilog=examples("fedvlm deploy admit fed/server request.json"))
def admit(
    folder: Server,
    request: Annotated[Path, typer.Argument(help="The site's request.json.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask: you have compared the fingerprint.")] = False,
) -> None:
    """Admit a site after you have compared the fingerprint."""
    from fedvlm.deploy.identity.enrolment import admit_site as sign
    from fedvlm.deploy.identity.enrolment import read_request
    from fedvlm.deploy.kits import read_server
    from fedvlm.errors import FederationError

    kit = read_server(folder)
    site_request = read_request(kit, request)
    typer.echo(f"{site_request.remark}\nfingerprint: {site_request.fingerprint}")
    if not yes and not typer.confirm("Call the site. Do they read out the same fingerprint?"):
        raise FederationError(
            f"{site_request.site} is not admitted; if the fingerprints differ, somebody has changed the "
            "invitation or the request on its way: send both again by another way"
        )
    typer.echo(f"{site_request.site} is admitted; send it {sign(kit, site_request)}, which contains no secret")


@deploy_app.command(rich_help_panel="Set up", epilog=examples("fedvlm deploy accept north north.json"))
def accept(
    folder: Site,
    file: Annotated[Path, typer.Argument(help="The NAME.json that the server sent.")],
) -> None:
    """Install the certificate that the server sent to a site."""
    from fedvlm.deploy.identity.certificates import describe_validity
    from fedvlm.deploy.identity.enrolment import accept_certificate as take

    admission = take(folder, file)
    typer.echo(
        f"{admission.site} may join {admission.address}; "
        f"its certificate {describe_validity(admission.days_left, folder)}"
    )
    typer.echo(f"fingerprint: {admission.fingerprint}")


@deploy_app.command(rich_help_panel="Keys and backups", epilog=examples("fedvlm deploy renew north"))
def renew(folder: Folder) -> None:
    """Renew a server's certificate or request a site's new key."""
    from fedvlm.deploy.identity.enrolment import create_join_request as ask
    from fedvlm.deploy.identity.enrolment import renew_server_certificate
    from fedvlm.deploy.kits import read_server

    if (folder / "server.toml").exists():
        days = renew_server_certificate(read_server(folder))
        typer.echo(f"the server's certificate is valid for {days} more days after the next start")
    else:
        _tell_request(ask(folder))


@deploy_app.command(rich_help_panel="Keys and backups", epilog=examples("fedvlm deploy revoke fed/server north"))
def revoke(folder: Server, site: Annotated[str, typer.Argument(help="Name of the site.")]) -> None:
    """Revoke a site's key, effective immediately."""
    from fedvlm.deploy.identity.enrolment import revoke_site as end
    from fedvlm.deploy.kits import read_server

    end(read_server(folder), site)
    typer.echo(f"{site} is revoked from its next message on; a revoked key cannot be used again")


@deploy_app.command(rich_help_panel="Keys and backups", epilog=examples("fedvlm deploy keys fed/server"))
def keys(folder: Folder) -> None:
    """List keys with fingerprints and days left."""
    from fedvlm.deploy.identity.enrolment import certificate_statuses

    for key_status in certificate_statuses(folder):
        days = "" if key_status.days is None else f"{key_status.days} days left"
        typer.echo(
            "  ".join(word for word in (key_status.name, key_status.fingerprint, days, key_status.remark) if word)
        )


@deploy_app.command(
    rich_help_panel="Consent and policy",
    epilog=examples("fedvlm deploy withdraw a --by Lee", "fedvlm deploy withdraw fed/server withdrawal.safetensors"),
)
def withdraw(
    folder: Folder,
    file: Annotated[Path | None, typer.Argument(help="At the server: the file that the site sent.")] = None,
    by: Annotated[str, typer.Option(help="At a site: name of the person who decides.")] = "",
    record: Annotated[
        list[Path] | None, typer.Option(help="Folder of a run outside the server's folder. Repeatable.")
    ] = None,
) -> None:
    """Withdraw a site from all later rounds.

    Its part of plain sums, such as TOFA's statistics, is subtracted.
    """
    if file is None:
        from fedvlm.deploy.withdrawal import withdraw as leave

        path = leave(folder, by)
        typer.echo(f"this site no longer answers requests; send {path} to the server to remove it there")
        return
    from fedvlm.deploy.kits import read_server
    from fedvlm.deploy.withdrawal import apply_withdrawal

    site, messages = apply_withdrawal(read_server(folder), file, record or [])
    for message in messages:
        typer.echo(str(message))
    typer.echo(f"{site} takes part in no later round; it can only come back with a new key")


@deploy_app.command(rich_help_panel="Run", epilog=examples("fedvlm deploy join fed/server runs/tofa west"))
def join(
    folder: Server,
    run: Annotated[str, typer.Argument(help="Name or folder of a finished run.")],
    site: Annotated[str, typer.Argument(help="Name of the late site, which must be running.")],
) -> None:
    """Give a late site its classifier from a finished run.

    No other site takes part.
    """
    from fedvlm.deploy.kits import read_server
    from fedvlm.deploy.operations.events import format_percent
    from fedvlm.deploy.server.launch import join_late_site as bring

    scores = bring(read_server(folder), run, site, lambda text: typer.echo(text, err=True))
    for name, score in scores.items():
        rows = score["test_rows"]
        accuracy_text = (
            f": {format_percent(score['test_hits'] / rows)} accuracy on its {rows} test samples" if rows else ""
        )
        typer.echo(f"{site} has its classifier from {name}{accuracy_text}")


@deploy_app.command(
    rich_help_panel="Keys and backups",
    epilog=examples(
        "fedvlm deploy peers north",
        "fedvlm deploy peers north --add south --fingerprint '1f2e ...' --by 'Dr Lee'",
    ),
)
def peers(
    folder: Site,
    add: Annotated[str, typer.Option(help="Name of the site whose fingerprint you have compared.")] = "",
    fingerprint: Annotated[str, typer.Option(help="What a person at the other site reads out.")] = "",
    by: Annotated[str, typer.Option(help="Name of the person who compared it.")] = "",
    renew: Annotated[bool, typer.Option("--renew", help="Replace the fingerprint: the site has a new key.")] = False,
    remove: Annotated[str, typer.Option(help="Name of a site to take off the list.")] = "",
) -> None:
    """List, add or remove sites whose keys you have compared.

    A site takes part in a verified sum only with the sites on its list. Compare fingerprints by phone, not by way of
    the server. With --fingerprint alone the command says whose it is.
    """
    from fedvlm.deploy.identity.certificates import read_own_certificate
    from fedvlm.deploy.site.peers import add_peer, normalise_fingerprint, read_peers, remove_peer

    if add:
        peer = add_peer(folder, add, fingerprint, by, renew)
        typer.echo(f"{peer.name} is a peer: {peer.fingerprint}, compared by {peer.compared_by}")
        return
    if remove:
        remove_peer(folder, remove)
        typer.echo(f"{remove} is no longer a peer; this site joins no verified sum with it")
        return
    known = read_peers(folder).values()
    if fingerprint:
        plain = normalise_fingerprint(fingerprint)
        names = [peer.name for peer in known if normalise_fingerprint(peer.fingerprint) == plain]
        typer.echo(f"this is the fingerprint of {names[0]}" if names else "no peer has this fingerprint")
        raise typer.Exit(0 if names else 1)
    own = read_own_certificate(folder)
    typer.echo(f"{own.site} (this site; read it out to the others)  {own.fingerprint}")
    for peer in known:
        typer.echo(f"{peer.name}  {peer.fingerprint}  compared by {peer.compared_by} {peer.compared_on[:10]}".rstrip())


@deploy_app.command(
    rich_help_panel="Run",
    epilog=examples("fedvlm deploy verify fed/server/runs/auto", "fedvlm deploy verify run --site north"),
)
def verify(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or of one transcript.")],
    site: Annotated[Path | None, typer.Option(help="Folder of a site, whose peers are compared.")] = None,
) -> None:
    """Verify the transcript of a verified sum offline."""
    from fedvlm.deploy.site.peers import read_peers
    from fedvlm.deploy.transcript import find_transcripts, verify_transcript

    known = {} if site is None else read_peers(site)
    for transcript in find_transcripts(run):
        for line in verify_transcript(transcript, known):
            typer.echo(line)
    typer.echo("verified: every signature, sum and state")
