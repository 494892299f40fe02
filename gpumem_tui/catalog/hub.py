"""The `config.json` of a model on the Hugging Face hub: from the hub's cache, else from the hub. No package is needed.

The hub is asked as huggingface_hub 2.4 asks it: `resolve` sends the file, or on to where it is, by a redirection within
the hub; `X-Repo-Commit` names the revision, `X-Error-Code` and `X-Error-Message` what is wrong (its function
`hf_raise_for_status`), `RateLimit` when to ask again (https://huggingface.co/docs/hub/rate-limits).
`tests/catalog/test_hub.py` compares the two.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from gpumem_tui.catalog.shapes import CatalogError
from gpumem_tui.system import replacing

if TYPE_CHECKING:
    from gpumem_tui.catalog.fetching import Fetched

FILE = "config.json"
PREFIX = "models--"
"""How huggingface_hub's cache names the folder of a model: ``models--OWNER--NAME`` with ``refs`` and ``snapshots``."""

_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w-][\w.-]*(?:/[\w-][\w.-]*)*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
HOW_TO_ASK = "leave --offline out"
_ANSWER_S = 6.0
"""So long is an answer waited for, with all that comes before it: finding the address, connecting, redirections."""
_MOST_BYTES = 4 << 20
"""Published configurations have up to some 100 KB, with the labels of a classifier in them."""
_YES = frozenset({"1", "on", "yes", "true"})
_UNKNOWN = "Invalid credentials in Authorization header"
_DISABLED = "Access to this resource is disabled."
"""The hub's text in `X-Error-Message` of a token it does not know, and of a model that was taken down."""
_RESET = re.compile(r";\s*r=0\s*;\s*t=(\d+)")
"""No request left of a `RateLimit`, and in how many seconds there will be."""


@dataclass(frozen=True)
class HubModel:
    """A model on the hub, and which revision of it."""

    name: str
    revision: str = "main"

    @property
    def folder(self) -> Path:
        """Where huggingface_hub's cache has it."""
        return cache() / f"{PREFIX}{self.name.replace('/', '--')}"

    @property
    def cached(self) -> Path | None:
        """Return its configuration in the cache; None where it is not there."""
        commit = self.commit
        file = None if commit is None else self.folder / "snapshots" / commit / FILE
        return file if file is not None and file.is_file() else None

    @property
    def commit(self) -> str | None:
        """The commit that the revision is, as far as the cache knows."""
        if _COMMIT.fullmatch(self.revision):
            return self.revision
        with suppress(OSError, UnicodeDecodeError):
            commit = (self.folder / "refs" / self.revision).read_text(encoding="utf-8").strip()
            return commit if re.fullmatch(r"[\w-]+", commit) else None
        kept = sorted((self.folder / "snapshots").glob(f"*/{FILE}")) if self.revision == "main" else []
        return kept[-1].parent.name if kept else None


def hub_model(name: str) -> HubModel | None:
    """Return the model that ``OWNER/NAME`` or ``OWNER/NAME@REVISION`` names; None for another text."""
    match = _NAME.fullmatch(name)
    return None if match is None or name.endswith(".json") else HubModel(match[1], match[2] or "main")


def cache() -> Path:
    """Return where huggingface_hub keeps models (its `constants.py`; HUGGINGFACE_HUB_CACHE is the older name)."""
    return _folder("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE") or _home() / "hub"


def cached_names() -> list[str]:
    """Return the models whose configuration is in the cache, in order."""
    folders = sorted(cache().glob(f"{PREFIX}*--*"))
    models = [hub_model(folder.name.removeprefix(PREFIX).replace("--", "/", 1)) for folder in folders]
    return [model.name for model in models if model is not None and model.cached is not None]


def configuration(model: HubModel, *, offline: bool = False) -> Path:
    """Return the file of a model's configuration, which is in the cache then; asks the hub where it was not.

    Args:
        offline: never ask the hub, as with ``HF_HUB_OFFLINE``.

    Raises:
        CatalogError: none exists, or it cannot be had: one line with what to type.
    """
    if (kept := model.cached) is not None:
        return kept
    if variable := _offline_by():
        raise CatalogError(f"{_lacking(model)}, and {variable} is set: unset it, or {_by_hand(model)}")
    if offline:
        raise CatalogError(f"{_lacking(model)}: {HOW_TO_ASK}, or {_by_hand(model)}")
    return _keep(model, _asked(model))


def weights_by_dtype(model: HubModel, *, offline: bool = False) -> Mapping[str, int]:
    """Return how many values of each type a model's safetensors have, as the hub states them; empty if unknown.

    The hub reads the headers of the files (https://huggingface.co/docs/hub/api, `expand[]=safetensors`).
    """
    if offline or _offline_by():
        return {}
    revision = quote(model.commit or model.revision, safe="")
    found = _get(f"api/models/{model.name}/revision/{revision}?{urlencode({'expand[]': 'safetensors'})}")
    with suppress(ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return {str(name): int(count) for name, count in json.loads(found.body)["safetensors"]["parameters"].items()}
    return {}


def _offline_by() -> str:
    """Return the variable that forbids to ask the hub; empty for none. The first that is set decides, as for others."""
    variable = "HF_HUB_OFFLINE" if os.environ.get("HF_HUB_OFFLINE") else "TRANSFORMERS_OFFLINE"
    return variable if os.environ.get(variable, "").lower() in _YES else ""


def _lacking(model: HubModel) -> str:
    return f"there is no file or folder {model.name}, and no model of that name in {cache()}"


def _by_hand(model: HubModel) -> str:
    page = f"{_endpoint()}/{model.name}/blob/{model.revision}/{FILE}"
    return f"give the path of its {FILE}, which {page} shows"


def _home() -> Path:
    return _folder("HF_HOME") or (_folder("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "huggingface"


def _folder(*variables: str) -> Path | None:
    """Return the folder that the first of the variables names which is set."""
    named = next(filter(None, map(os.environ.get, variables)), None)
    return None if named is None else Path(os.path.expandvars(named)).expanduser()


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _token() -> str:
    """Return the user's token; empty for none."""
    if os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").lower() in _YES:
        return ""
    found = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or ""
    if not found:
        with suppress(OSError, UnicodeDecodeError):
            found = (_folder("HF_TOKEN_PATH") or _home() / "token").read_text(encoding="utf-8")
    return found.strip()


def _asked(model: HubModel) -> Fetched:
    """Ask the hub for a model's configuration.

    Raises:
        CatalogError: it has none, does not give it, or does not answer.
    """
    found = _get(f"{model.name}/resolve/{quote(model.commit or model.revision, safe='')}/{FILE}")
    if found.status >= 300:
        raise CatalogError(_refusal(model, found))
    if not found.status:
        said = f"{_lacking(model)}; {_endpoint()} cannot be reached ({found.reason})"
        raise CatalogError(f"{said}: {_by_hand(model)}{_known_here(model)}")
    if found.reason:
        raise CatalogError(f"the {FILE} of {model.name} on {_endpoint()} {found.reason}")
    return found


def _get(path: str) -> Fetched:
    from gpumem_tui.catalog.fetching import fetch

    return fetch(f"{_endpoint()}/{path}", _token(), within_s=_ANSWER_S, most_bytes=_MOST_BYTES)


def _refusal(model: HubModel, found: Fetched) -> str:
    """Say what the hub refused, and what to do about it."""
    code, page = found.headers.get("x-error-code", ""), f"{_endpoint()}/{model.name}"
    said = found.headers.get("x-error-message", "")
    if said == _UNKNOWN:
        return f"{_endpoint()} does not know your token, which may have expired: `hf auth login`, or unset HF_TOKEN"
    if code == "GatedRepo":
        how = (
            "your token's account is not let in yet" if _token() else "`hf auth login` or HF_TOKEN=… states who you are"
        )
        return f"{model.name} is gated: accept its terms on {page}; {how}"
    if said == _DISABLED:
        return f"{model.name} was disabled on {_endpoint()}: take another model, or the path of a {FILE}"
    if found.status == 403:
        return f"{_endpoint()} forbids {model.name} ({said or found.reason}): give your token the right to read it"
    if code == "RevisionNotFound":
        return f"{model.name} has no revision {model.revision!r}: {page}/tree/main lists them"
    if code == "EntryNotFound":
        return (
            f"{model.name} has no {FILE}, so it is not one that transformers builds (a GGUF file or a pipeline of "
            "diffusers has none): give your training command after --"
        )
    if code == "RepoNotFound" or found.status in (401, 404):
        near, search = _nearest(model), urlencode({"search": model.name.partition("/")[2]})
        check = f"check the name on {_endpoint()}/models?{search} ; a private one takes `hf auth login` or HF_TOKEN=…"
        hint = f"did you mean {near}?" if near else f"{check}{_known_here(model)}"
        return f"there is no file or folder {model.name}, nor a model of that name on {_endpoint()}: {hint}"
    if found.status == 429:
        reset = _RESET.search(found.headers.get("ratelimit", ""))
        wait = f"{int(reset[1])} s" if reset else "five minutes"
        return f"{_endpoint()} has had too many requests (429): wait {wait}, or set HF_TOKEN"
    return f"{_endpoint()} answered {found.status} ({found.reason}) for {model.name}: try again, or {_by_hand(model)}"


def _nearest(model: HubModel) -> str:
    """Return the names on the hub that a wrong one resembles, with commas; empty for none.

    The owner's models are asked for first, then those that others have by that title.
    """
    owner, _, title = model.name.partition("/")
    for query in ({"search": re.split(r"[-_.]", title)[0], "author": owner}, {"search": title}):
        found = _get(f"api/models?{urlencode({**query, 'limit': 200})}")
        with suppress(ValueError, RecursionError):
            listed = json.loads(found.body) if found.body else []
            names = [one["id"] for one in listed if isinstance(one, dict) and isinstance(one.get("id"), str)]
            if near := _alike(model.name, filter(_NAME.fullmatch, names)):
                return near
    return ""


def _known_here(model: HubModel) -> str:
    """Name those in the cache or in the catalog that a wrong one resembles; empty for none."""
    from gpumem_tui.catalog.loader import models

    near = _alike(model.name, cached_names()) or _alike(model.name.partition("/")[2], models())
    return f"; nearest here: {near}" if near else ""


def _alike(name: str, names: Iterable[str]) -> str:
    by_letters = {one.lower(): one for one in names}
    return ", ".join(by_letters[one] for one in get_close_matches(name.lower(), by_letters, 3, 0.75))


def _keep(model: HubModel, answer: Fetched) -> Path:
    """Write a configuration into the cache, as huggingface_hub does, and return the file.

    Raises:
        CatalogError: it is no configuration, or cannot be written.
    """
    try:
        values: object = json.loads(answer.body)
    except (ValueError, RecursionError) as error:
        raise CatalogError(f"the {FILE} of {model.name} on {_endpoint()} is not valid JSON: {error}") from error
    if not isinstance(values, Mapping):
        raise CatalogError(f"the {FILE} of {model.name} on {_endpoint()} is no JSON object; name another model")
    said = model.commit or answer.headers.get("x-repo-commit", "")
    commit = said if _COMMIT.fullmatch(said) else hashlib.sha1(answer.body, usedforsecurity=False).hexdigest()
    file = model.folder / "snapshots" / commit / FILE
    reference = model.folder / "refs" / model.revision
    try:
        for target, content in ((file, answer.body), (reference, commit.encode())):
            if target == reference and (_COMMIT.fullmatch(model.revision) or target.exists()):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target) as kept:
                kept.write(content)
    except OSError as error:
        where = f"{error.filename or file}: {error.strerror}"
        raise CatalogError(f"{model.name} cannot be kept: {where}; set HF_HUB_CACHE to a folder of yours") from error
    return file
