"""Enrol sites: requests, admission, renewal, revocation and withdrawal."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from fedvlm.cli.deploy import Folder, Server, Site, command, deploy_app
from fedvlm.cli.options import echo_error
from fedvlm.errors import FederationError

__all__ = ["deploy_app"]  # with these commands


@command("Set up", "fedvlm deploy join-request north --name north --invitation invitation.json", name="join-request")
def join_request(
    folder: Site,
    name: Annotated[str | None, Option(help="Name of the site.")] = None,
    invitation: Annotated[Path | None, Option(help="The server's invitation.json.")] = None,
) -> None:
    """Create a site's key and its request to join."""
    from fedvlm.deploy.identity.enrolment import create_join_request

    _tell_request(create_join_request(folder, invitation, name))


def _tell_request(request: Any) -> None:
    typer.echo(f"send {request.path} to the server; the private key stays at this site")
    typer.echo(f"fingerprint to read out to the server's operator: {request.fingerprint}")


@command("Set up", "fedvlm deploy admit fed/server request.json")
def admit(
    folder: Server,
    request: Annotated[Path, Argument(help="The site's request.json.")],
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask: you have compared the fingerprint.")] = False,
) -> None:
    """Admit a site after you have compared the fingerprint."""
    from fedvlm.deploy.identity.enrolment import admit_site, read_request
    from fedvlm.deploy.kits import read_server

    kit = read_server(folder)
    site_request = read_request(kit, request)
    typer.echo(f"{site_request.remark}\nfingerprint: {site_request.fingerprint}")
    if not yes and not typer.confirm("Call the site. Do they read out the same fingerprint?"):
        raise FederationError(
            f"{site_request.site} is not admitted; if the fingerprints differ, somebody has changed the "
            "invitation or the request on its way: send both again by another way"
        )
    typer.echo(f"{site_request.site} is admitted; send it {admit_site(kit, site_request)}, which contains no secret")


@command("Set up", "fedvlm deploy accept north north.json")
def accept(folder: Site, file: Annotated[Path, Argument(help="The NAME.json that the server sent.")]) -> None:
    """Install the certificate that the server sent to a site."""
    from fedvlm.deploy.identity.certificates import describe_validity
    from fedvlm.deploy.identity.enrolment import accept_certificate

    admission = accept_certificate(folder, file)
    validity = describe_validity(admission.days_left, folder)
    typer.echo(f"{admission.site} may join {admission.address}; its certificate {validity}")
    typer.echo(f"fingerprint: {admission.fingerprint}")


@command("Keys and backups", "fedvlm deploy renew north")
def renew(folder: Folder) -> None:
    """Renew a server's certificate or request a site's new key."""
    from fedvlm.deploy.identity.enrolment import create_join_request, renew_server_certificate
    from fedvlm.deploy.kits import read_server

    if (folder / "server.toml").exists():
        days = renew_server_certificate(read_server(folder))
        typer.echo(f"the server's certificate is valid for {days} more days after the next start")
    else:
        _tell_request(create_join_request(folder))


@command("Keys and backups", "fedvlm deploy revoke fed/server north")
def revoke(folder: Server, site: Annotated[str, Argument(help="Name of the site.")]) -> None:
    """Revoke a site's key, effective immediately."""
    from fedvlm.deploy.identity.enrolment import revoke_site
    from fedvlm.deploy.kits import read_server

    revoke_site(read_server(folder), site)
    typer.echo(f"{site} is revoked from its next message on; a revoked key cannot be used again")


@command("Keys and backups", "fedvlm deploy keys fed/server")
def keys(folder: Folder) -> None:
    """List keys with fingerprints and days left."""
    from fedvlm.deploy.identity.enrolment import certificate_statuses

    for key in certificate_statuses(folder):
        days = "" if key.days is None else f"{key.days} days left"
        typer.echo("  ".join(word for word in (key.name, key.fingerprint, days, key.remark) if word))


@command(
    "Consent and policy",
    "fedvlm deploy withdraw a --by Lee",
    "fedvlm deploy withdraw fed/server withdrawal.safetensors",
)
def withdraw(
    folder: Folder,
    file: Annotated[Path | None, Argument(help="At the server: the file that the site sent.")] = None,
    by: Annotated[str, Option(help="At a site: name of the person who decides.")] = "",
    record: Annotated[
        list[Path] | None, Option(help="Folder of a run outside the server's folder. Repeatable.")
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


@command("Run", "fedvlm deploy join fed/server runs/tofa west")
def join(
    folder: Server,
    run: Annotated[str, Argument(help="Name or folder of a finished run.")],
    site: Annotated[str, Argument(help="Name of the late site, which must be running.")],
) -> None:
    """Give a late site its classifier from a finished run.

    No other site takes part.
    """
    from fedvlm.deploy.kits import read_server
    from fedvlm.deploy.operations.events import format_percent
    from fedvlm.deploy.server.launch import join_late_site

    for name, score in join_late_site(read_server(folder), run, site, echo_error).items():
        rows = score["test_rows"]
        accuracy = f": {format_percent(score['test_hits'] / rows)} accuracy on its {rows} test samples" if rows else ""
        typer.echo(f"{site} has its classifier from {name}{accuracy}")


@command(
    "Keys and backups",
    "fedvlm deploy peers north",
    "fedvlm deploy peers north --add south --fingerprint '1f2e ...' --by 'Dr Lee'",
)
def peers(
    folder: Site,
    add: Annotated[str, Option(help="Name of the site whose fingerprint you have compared.")] = "",
    fingerprint: Annotated[str, Option(help="What a person at the other site reads out.")] = "",
    by: Annotated[str, Option(help="Name of the person who compared it.")] = "",
    renew: Annotated[bool, Option("--renew", help="Replace the fingerprint: the site has a new key.")] = False,
    remove: Annotated[str, Option(help="Name of a site to take off the list.")] = "",
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


@command("Run", "fedvlm deploy verify fed/server/runs/auto", "fedvlm deploy verify run --site north")
def verify(
    run: Annotated[Path, Argument(help="Folder of a run, or of one transcript.")],
    site: Annotated[Path | None, Option(help="Folder of a site, whose peers are compared.")] = None,
) -> None:
    """Verify the transcript of a verified sum offline."""
    from fedvlm.deploy.site.peers import read_peers
    from fedvlm.deploy.transcript import find_transcripts, verify_transcript

    known = {} if site is None else read_peers(site)
    for transcript in find_transcripts(run):
        for line in verify_transcript(transcript, known):
            typer.echo(line)
    typer.echo("verified: every signature, sum and state")
