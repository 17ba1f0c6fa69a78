"""Makes the page of a track: one HTML file that opens from disk and fetches nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fcl_bench.results.page.document import as_json, asset, document

#: What the page shows of a row; the columns of `board_page`'s docstring.
_KEYS = (
    *("method", "title", "family", "kind", "ceiling", "setting", "status", "why", "n", "A_T", "A_T_std", "A_avg"),
    *("A_avg_std", "forgetting", "up_mib", "down_mib", "kept_mib", "samples_kept", "rounds", "steps"),
    *("client_seconds", "server_seconds", "revealed", "mark", "behind", "low", "high", "gates", "gate_texts", "curve"),
    *("command", "tuning", "trials", "run_ids", "commits"),
)


def board_page(board: Mapping[str, Any]) -> str:
    """Return the page of a board as text, with its styles, scripts and data inside, and a policy that forbids all else.

    Args:
        board: `track`, `version`, `about`, `data`, `date`, `command` and `conclusion` are texts (an empty conclusion
            is left out); `shared` are the settings that all rows have, `settings` those in which they differ (a list of
            mappings), `seeds` and `revisions` lists. Each of `rows` is one method in one of the `settings` (its index)
            and of one `kind` ("defaults" or "tuned"); its `status` is "run", or "not run" with the reason in `why`.
            Accuracies, `behind`, `low`, `high` (distance to the best and its 95 % interval), `forgetting` and
            `revealed` are in percent, bytes in MiB over the whole stream, `curve` is the accuracy after each task;
            `ceiling` rows get no rank. What is absent is None, NaN or not there.
    """
    rows = board["rows"]
    data = {
        **{key: board[key] for key in ("track", "settings")},
        "keys": _KEYS,
        "rows": [[_plain(row.get(key)) for key in _KEYS] for row in rows],
    }
    styles = (asset("look.css"), asset("page.css", __package__))
    return document(
        asset("page.html", __package__),
        [asset("draw.js", __package__), asset("page.js", __package__)],
        board=board,
        style="".join(styles),
        data=as_json(data),
        methods=len({row["method"] for row in rows}),
    )


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: numbers with six digits, and None for those that are not finite."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
