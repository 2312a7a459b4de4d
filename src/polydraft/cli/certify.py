"""`polydraft certify`."""

import json
from typing import TYPE_CHECKING, Any, ClassVar

import click

from polydraft.cli.options import (
    GroupedCommand,
    Loading,
    Threads,
    json_option,
    loading_options,
    machine_options,
    options_of,
    prompts_option,
    raw_option,
    set_threads,
    taken,
    with_options,
)
from polydraft.cli.terminal import PhaseProgress, announce_start
from polydraft.errors import FailureError, UsageError

if TYPE_CHECKING:
    from polydraft.certify import Certificate

_prompted = with_options(
    [
        prompts_option,
        click.option(
            "--limit", type=int, default=20, show_default=True, help="Use this many prompts, spread over the categories."
        ),
        click.option(
            "--max-new-tokens", type=int, default=64, show_default=True, help="Generate at most this many tokens per text."
        ),
        json_option,
    ]
)
"""Options shared by both commands that compare texts with the target's."""


@click.command("decoder", cls=GroupedCommand)
@loading_options
@raw_option
@_prompted
def _decoder(raw: bool, as_json: bool, source: str, limit: int, max_new_tokens: int, **options: Any) -> None:
    """Compare a decoder's greedy texts, token by token, with those of the target alone.

    The target's own text comes from its Hugging Face forward pass, one token at a time. Where two texts differ, the target's
    logits decide: if the two are practically equal, it is a near-tie, and the comparison continues from there; anything else is
    a counter-example. --scheme matters only if --draft-temperature is above 0. A --lossy decoder is expected to fail.
    """
    announce_start()
    from polydraft.certify.greedy_identity import certify_decoder
    from polydraft.prompts import load_prompts

    loading = Loading(**options)
    prompts = load_prompts(source, limit)
    with PhaseProgress() as progress:
        decoder = loading.decoder()
        certificate = certify_decoder(decoder, prompts, max_new_tokens=max_new_tokens, chat=not raw, observer=progress)
    _show(certificate, as_json)
    if not decoder.lossless:  # equal texts prove nothing then
        raise FailureError(f"{decoder.drafter.name} is not certified: it declares itself lossy; more prompts would show it")


@click.command("endpoint")
@options_of(Loading, only=("target",))
@click.option("--url", required=True, help="Address of an OpenAI-compatible server, such as http://localhost:8000/v1.")
@click.option("--model", required=True, help="Name of the model on that server.")
@click.option("--chat", is_flag=True, help="Ask /v1/chat/completions instead of /v1/completions.")
@click.option("--timeout", type=float, default=120.0, show_default=True, help="Seconds to wait for one answer.")
@_prompted
@machine_options()
def _endpoint(as_json: bool, source: str, limit: int, max_new_tokens: int, **options: Any) -> None:
    """Compare an endpoint's text at temperature 0 with the greedy text of --target, the model it claims to serve.

    Texts are compared along the target's tokens; its logits decide what is a near-tie, as in 'certify decoder'. Prompts are
    sent as they are or, with --chat, as one user message.
    """
    announce_start()
    from polydraft.certify.endpoint import Endpoint
    from polydraft.certify.greedy_identity import certify_endpoint
    from polydraft.prompts import load_prompts

    endpoint = taken(Endpoint, options)
    loading = Loading(draft="none", **options)
    prompts = load_prompts(source, limit)
    endpoint.complete(prompts[0].content, 1)  # fail before loading a model if there is no server
    with PhaseProgress() as progress:
        target = loading.decoder()
        certificate = certify_endpoint(endpoint, target, prompts, max_new_tokens=max_new_tokens, observer=progress)
    _show(certificate, as_json)


class _Certify(click.Command):
    """A command that takes names, unless its first argument is a subcommand."""

    others: ClassVar[dict[str, click.Command]] = {"decoder": _decoder, "endpoint": _endpoint}

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args and args[0] in self.others:
            return self.others[args[0]].make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(
    "certify",
    cls=_Certify,
    epilog="Also: polydraft certify decoder --help, polydraft certify endpoint --help.",
)
@click.argument("names", metavar="NAME...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Certify every scheme, and every walk with every scheme that fits it.")
@click.option(
    "--draws", default=None, help="How drafts for your function are drawn: with-replacement, without-replacement or top."
)
@click.option("--arrays", default="torch", show_default=True, help="Arrays that your function takes: torch or numpy.")
@click.option("--quick", is_flag=True, help="Try fewer cases: seconds instead of half a minute per name.")
@click.option("--no-power", is_flag=True, help="Skip the known wrong rules.")
@options_of(Threads)
@json_option
def command(
    names: tuple[str, ...],
    everything: bool,
    draws: str | None,
    arrays: str,
    quick: bool,
    no_power: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Certify that verification rules leave the target's distribution unchanged.

    NAME is a scheme, a walk, SCHEME+WALK, or your own rule as module:attribute: a subclass of Scheme or Walk, a function
    distribution(target_probs, draft_probs, children) -> probs, or a function verify(target_probs, draft_probs, children, rng)
    -> token, which can only be sampled. Each rule is enumerated exactly, sampled, and run through the whole engine. Known wrong
    rules get the same checks, to show that they are caught. If a rule fails, the command prints the smallest counter-example it
    found and exits with code 1.
    """
    if everything and names:
        raise UsageError(f"--all already covers {names[0]}; give names or --all, not both")
    if not everything and not names:
        raise UsageError("name what to certify, such as rrs-wor, or give --all; 'polydraft info' lists schemes and walks")
    for flag, value, default in (("--draws", draws, None), ("--arrays", arrays, "torch")):
        if everything and value != default:
            raise UsageError(f"{flag} {value} works only with your own function, module:function; leave it out with --all")
    announce_start()
    from polydraft.certify import FULL, QUICK, all_subjects, certify, find_subject

    subjects = all_subjects() if everything else [find_subject(name, draws, arrays) for name in dict.fromkeys(names)]
    set_threads(threads)
    with PhaseProgress() as progress:
        certificate = certify(subjects, QUICK if quick else FULL, power=not no_power, observer=progress)
    _show(certificate, as_json)


def _show(certificate: "Certificate", as_json: bool) -> None:
    """Print the certificate; then raise an error if anything failed."""
    click.echo(json.dumps(certificate.as_dict(), ensure_ascii=False) if as_json else certificate.text())
    if not certificate.certified:
        first = certificate.failures[0]
        raise FailureError(f"{first.subject} is not certified: {first.name} failed ({_reason(first)})")


def _reason(check: Any) -> str:
    return check.counter_example.reason if check.counter_example is not None else f"{check.measure} {check.worst:.3g}"
