"""The command that serves: serve-reward."""

from __future__ import annotations

from plimsoll.cli.options import Parser


def serve_reward(words: list[str]) -> None:
    parser = Parser(
        "serve-reward",
        usage="plimsoll serve-reward CONFIG.yaml [--section.key VALUE ...] [options]",
        description="Answer over HTTP what the rewards and reward models of a config give, in "
        "Plimsoll's request format and in OpenRLHF's: POST to /NAME, and to /score and "
        "/get_reward where one is served. Ends with Ctrl-C.",
    )
    parser.add_argument("config", help="a config with rewards or reward models")
    parser.add_argument("--reward", metavar="NAME", help="serve only this one")
    parser.add_argument("--host", default="127.0.0.1", help="who may ask (%(default)s: this host)")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one (%(default)s)")

    from plimsoll.config.flags import split_flags

    rest, flags = split_flags(words)
    options = parser.parse_args(rest)

    from plimsoll.commands.serve_reward import chosen_rewards, refuse_without_packages, serve

    refuse_without_packages()
    serve(chosen_rewards(options.config, flags, options.reward), options.host, options.port)
