"""A model by its name on the Hugging Face hub: a local server answers as the hub does."""

from __future__ import annotations

import json
import runpy
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from urllib.parse import parse_qs, urlsplit

import pytest

from gpumem_tui.catalog import hub
from gpumem_tui.catalog.config_file import looks_like_path, read_config_file
from gpumem_tui.catalog.hub import HubModel, cached_names, hub_model, weights_by_dtype
from gpumem_tui.catalog.loader import NoClosedFormError, shape_from_hf_config
from gpumem_tui.catalog.shapes import CatalogError
from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.memory import Range
from gpumem_tui.options.configuration import asked_by
from gpumem_tui.options.serving import ServeTerms, served

PUBLISHED: dict[str, dict[str, object]] = json.loads(
    Path(__file__).with_name("hub_configs.json").read_text(encoding="utf-8")
)
"""Configurations of the hub by name: where the text was found, and the parameters, or why there is no formula."""
COMMIT = "70d244cc86ccca08cf5af4e1e306ecf908b1ad5e"
QWEN = json.dumps(PUBLISHED["Qwen/Qwen3-1.7B"]["config"]).encode()

Answer = Callable[["_Handler"], None]


@dataclass
class Hub:
    """The server: what it answers by path, and what it was asked: paths with their tokens."""

    address: str
    answers: dict[str, Answer] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)


class _Server(ThreadingMixIn, TCPServer):
    """An `HTTPServer` asks for the name of its own host, which takes seconds without a network."""

    daemon_threads = True
    allow_reuse_address = True
    hub: Hub


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self.server.hub.asked.append((self.path, self.headers.get("Authorization", "")))
        path = self.path.partition("?")[0]
        self.server.hub.answers.get(path, refusing(404, "RepoNotFound"))(self)

    do_HEAD = do_GET  # noqa: N815 - its base class calls it

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing."""

    def send(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def sending(body: bytes, commit: str = COMMIT) -> Answer:
    return lambda handler: handler.send(200, body, X_Repo_Commit=commit, ETag='"a"')


def refusing(code: int, error: str = "", message: str = "as the hub words it", limit: str = "") -> Answer:
    said = {"X_Error_Code": error, "X_Error_Message": message, "RateLimit": limit}
    return lambda handler: handler.send(code, b"Access denied", **{name: text for name, text in said.items() if text})


def sent_on(location: str, code: int = 307) -> Answer:
    return lambda handler: handler.send(code, Location=location, X_Repo_Commit=COMMIT)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in (*SETTINGS, "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("no_proxy", "*")
    with _Server(("127.0.0.1", 0), _Handler) as running:
        running.hub = Hub(f"http://127.0.0.1:{running.server_address[1]}")
        monkeypatch.setenv("HF_ENDPOINT", f"{running.hub.address}/")
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield running.hub
        running.shutdown()


SETTINGS = (
    "HF_HOME",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "XDG_CACHE_HOME",
    "HF_TOKEN_PATH",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
)


def refused(name: str, *, offline: bool = False) -> str:
    with pytest.raises(CatalogError) as caught:
        read_config_file(name, offline=offline)
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    return said


RESOLVE = "/Qwen/Qwen3-1.7B/resolve/main/config.json"
EXPIRED = "Invalid credentials in Authorization header"
DISABLED = "Access to this resource is disabled."


class TestReading:
    def test_it_is_asked_for_once_and_kept_where_huggingface_hub_keeps_it(self, server: Hub, tmp_path: Path) -> None:
        server.answers[RESOLVE] = sending(QWEN)
        first = read_config_file("Qwen/Qwen3-1.7B")
        again = read_config_file("Qwen/Qwen3-1.7B", offline=True)
        assert first == again
        assert (first.name, first.model_type) == ("Qwen3-1.7B", "qwen3")
        folder = tmp_path / "hf" / "hub" / "models--Qwen--Qwen3-1.7B"
        assert first.path == str(folder / "snapshots" / COMMIT / "config.json")
        assert (folder / "refs" / "main").read_text() == COMMIT
        assert server.asked == [(RESOLVE, "")]

    def test_a_redirection_within_the_hub_is_followed_with_the_token(
        self, server: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", "hf_mine")
        there = f"/api/resolve-cache/models/Qwen/Qwen3-1.7B/{COMMIT}/config.json?etag=%22a%22"
        server.answers[RESOLVE] = sent_on(there)
        server.answers[there.partition("?")[0]] = lambda handler: handler.send(200, QWEN)
        assert COMMIT in read_config_file("Qwen/Qwen3-1.7B").path
        assert server.asked == [(RESOLVE, "Bearer hf_mine"), (there, "Bearer hf_mine")]

    def test_another_host_gets_no_token(self, server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", "hf_mine")
        server.answers[RESOLVE] = sent_on(f"{server.address.replace('127.0.0.1', 'localhost')}/elsewhere", 302)
        server.answers["/elsewhere"] = sending(QWEN)
        read_config_file("Qwen/Qwen3-1.7B")
        assert [token for _, token in server.asked] == ["Bearer hf_mine", ""]

    def test_the_token_of_hf_auth_login_is_used(self, server: Hub, tmp_path: Path) -> None:
        (tmp_path / "hf").mkdir()
        (tmp_path / "hf" / "token").write_text("hf_file\n")
        server.answers[RESOLVE] = sending(QWEN)
        read_config_file("Qwen/Qwen3-1.7B")
        assert server.asked == [(RESOLVE, "Bearer hf_file")]

    def test_a_revision_is_asked_for_and_kept_under_its_name(self, server: Hub) -> None:
        server.answers["/Qwen/Qwen3-1.7B/resolve/refs%2Fpr%2F1/config.json"] = sending(QWEN)
        found = read_config_file("Qwen/Qwen3-1.7B@refs/pr/1")
        assert read_config_file("Qwen/Qwen3-1.7B@refs/pr/1", offline=True) == found
        assert read_config_file(f"Qwen/Qwen3-1.7B@{COMMIT}", offline=True) == found
        assert "no model of that name" not in refused("Qwen/Qwen3-1.7B@v2")

    def test_what_is_cached_without_a_configuration_gets_that_of_its_commit(self, server: Hub) -> None:
        folder = HubModel("Qwen/Qwen3-1.7B").folder
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(COMMIT)
        server.answers[f"/Qwen/Qwen3-1.7B/resolve/{COMMIT}/config.json"] = sending(QWEN, "f" * 40)
        assert COMMIT in read_config_file("Qwen/Qwen3-1.7B").path

    def test_those_that_are_kept_can_be_completed(self, server: Hub) -> None:
        server.answers[RESOLVE] = sending(QWEN)
        assert cached_names() == []
        read_config_file("Qwen/Qwen3-1.7B")
        (HubModel("Qwen/Qwen3-8B").folder / "blobs").mkdir(parents=True)
        assert cached_names() == ["Qwen/Qwen3-1.7B"]

    def test_a_file_of_that_name_goes_first(self, server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "Qwen" / "Qwen3-1.7B").mkdir(parents=True)
        (tmp_path / "Qwen" / "Qwen3-1.7B" / "config.json").write_bytes(QWEN)
        read_config_file("Qwen/Qwen3-1.7B")
        assert not server.asked


class TestWeights:
    """`predict --serve` asks for the types of weights that no formula counts."""

    GEMMA = json.dumps(
        {
            "model_type": "gemma2", "num_hidden_layers": 26, "num_attention_heads": 8, "hidden_size": 2304,
            "max_position_embeddings": 8192, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
        }
    ).encode()  # fmt: skip
    PATH = f"/api/models/google/gemma-2-2b/revision/{COMMIT}"

    @pytest.mark.parametrize(
        ("parameters", "size"),
        [
            ({"BF16": 1000}, 2000),
            ({"F32": 1000, "F8_E4M3": 10}, 2010),
            ({"I32": 1000, "F16": 10}, None),
            (None, None),
        ],
    )
    def test_they_are_counted_by_type(self, server: Hub, parameters: object, size: int | None) -> None:
        server.answers["/google/gemma-2-2b/resolve/main/config.json"] = sending(self.GEMMA)
        server.answers[self.PATH] = sending(json.dumps({"safetensors": {"parameters": parameters}}).encode())
        found = served(asked_by({"model": "google/gemma-2-2b", "gpu": "sim:t4-16gb"}), ServeTerms(concurrency=2))
        assert (found.weights.high_bytes if isinstance(found.weights, Range) else None) == size
        assert server.asked[-1][0] == f"{self.PATH}?expand%5B%5D=safetensors"

    def test_offline_nobody_is_asked(self, server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert weights_by_dtype(HubModel("google/gemma-2-2b")) == {}
        assert server.asked == []


class TestRefusals:
    @pytest.mark.parametrize(
        ("answer", "said"),
        [
            (refusing(401, "GatedRepo"), "is gated: accept its terms on {hub}/Qwen/Qwen3-1.7B; `hf auth login` or HF_"),
            (refusing(403, "GatedRepo"), "is gated: accept its terms"),
            (refusing(401, "RepoNotFound"), "nor a model of that name on {hub}: check the name on {hub}/models?"),
            (refusing(404, "RevisionNotFound"), "has no revision 'main'"),
            (refusing(404, "EntryNotFound"), "has no config.json, so it is not one that transformers builds"),
            (refusing(401, message=EXPIRED), "{hub} does not know your token, which may have expired: `hf auth login`"),
            (refusing(403, message=DISABLED), "Qwen/Qwen3-1.7B was disabled on {hub}: take another model"),
            (refusing(403), "{hub} forbids Qwen/Qwen3-1.7B (as the hub words it): give your token the right to read"),
            (refusing(429), "too many requests (429): wait five minutes, or set HF_TOKEN"),
            (refusing(429, limit='"resolvers";r=0;t=55'), "too many requests (429): wait 55 s, or set HF_TOKEN"),
            (refusing(503), "answered 503 (Service Unavailable) for Qwen/Qwen3-1.7B: try again, or give the path of"),
            (sent_on(RESOLVE), "answered 307"),
            (sent_on("file:///etc/passwd"), "answered 307"),
            (sending(b"<html>Please log in to the hotel's network</html>"), "is not valid JSON"),
            (sending(b"[" * 100_000), "is not valid JSON"),
            (sending(b'["a list"]'), "is no JSON object"),
            (sending(b" " * (5 << 20)), "has more than 4 MiB"),
        ],
    )
    def test_each_is_one_line_with_what_to_do_and_nothing_is_kept(self, server: Hub, answer: Answer, said: str) -> None:
        server.answers[RESOLVE] = answer
        assert said.format(hub=server.address) in refused("Qwen/Qwen3-1.7B")
        assert HubModel("Qwen/Qwen3-1.7B").cached is None

    def test_a_misspelt_name_gets_those_that_the_owner_has(self, server: Hub) -> None:
        listed = [{"id": name} for name in ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B", "Qwen/Qwen-VL")]
        server.answers["/api/models"] = lambda handler: handler.send(200, json.dumps(listed).encode())
        assert "did you mean Qwen/Qwen3-1.7B" in refused("Qwen/Qwen3-1.7")
        assert server.asked[-1][0] == "/api/models?search=Qwen3&author=Qwen&limit=200"

    def test_a_misspelt_owner_gets_those_that_others_have_by_that_title(self, server: Hub) -> None:
        def answer(handler: _Handler) -> None:
            found = [] if "author" in handler.path else [{"id": "Qwen/Qwen3-1.7B"}, {"id": "someone/Qwen3-1.7B-GGUF"}]
            handler.send(200, json.dumps(found).encode())

        server.answers["/api/models"] = answer
        assert "did you mean Qwen/Qwen3-1.7B" in refused("Qwem/Qwen3-1.7B")
        server.answers["/api/models"] = lambda handler: handler.send(200, b"[]")
        assert f"check the name on {server.address}/models?search=nothing-alike ;" in refused("nobody/nothing-alike")

    def test_without_the_hub_a_misspelt_name_gets_those_of_the_catalog_and_of_the_cache(
        self, server: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.answers[RESOLVE] = sending(QWEN)
        read_config_file("Qwen/Qwen3-1.7B")
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
        assert refused("Qwem/Qwen3-1.7B").endswith("config.json shows; nearest here: Qwen/Qwen3-1.7B")
        assert "; nearest here: llama-3-8b" in refused("meta/Lama-3-8B")

    def test_a_hub_that_does_not_answer_is_not_waited_for(self, server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hub, "_ANSWER_S", 0.2)
        ended, answered = threading.Event(), threading.Event()

        def answer(handler: _Handler) -> None:
            ended.wait(20)
            answered.set()
            handler.send(500)

        server.answers[RESOLVE] = answer
        said = refused("Qwen/Qwen3-1.7B")
        assert not answered.is_set()
        ended.set()
        assert "cannot be reached (" in said
        assert "give the path of its config.json" in said

    def test_a_hub_that_is_not_there_is_said_with_the_reason(
        self, server: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
        assert "http://127.0.0.1:1 cannot be reached (Connection refused): give" in refused("Qwen/Qwen3-1.7B")
        monkeypatch.setenv("HF_ENDPOINT", "file:///etc")
        assert "HF_ENDPOINT is no address of the web" in refused("Qwen/Qwen3-1.7B")

    @pytest.mark.parametrize(
        ("variable", "offline", "said"),
        [
            ("HF_HUB_OFFLINE", False, "HF_HUB_OFFLINE is set: unset it, or give the path of its config.json"),
            ("TRANSFORMERS_OFFLINE", False, "TRANSFORMERS_OFFLINE is set"),
            ("HF_HOME", True, "leave --offline out, or give the path of its config.json"),
        ],
    )
    def test_offline_asks_nobody(
        self, server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, offline: bool, said: str
    ) -> None:
        monkeypatch.setenv(variable, str(tmp_path) if variable == "HF_HOME" else "1")
        assert said in refused("Qwen/Qwen3-1.7B", offline=offline)
        assert not server.asked

    def test_a_cache_that_cannot_be_written_names_the_variable(
        self, server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "file"))
        server.answers[RESOLVE] = sending(QWEN)
        assert "cannot be kept" in refused("Qwen/Qwen3-1.7B")
        assert "set HF_HUB_CACHE to a folder of yours" in refused("Qwen/Qwen3-1.7B")


class TestAsThePackageDoes:
    """huggingface_hub itself asks the same server."""

    @pytest.mark.parametrize(
        "answer",
        [sending(QWEN), sent_on(f"/api/resolve-cache/models/Qwen/Qwen3-1.7B/{COMMIT}/config.json?etag=%22a%22")],
    )
    def test_each_reads_what_the_other_kept(self, server: Hub, tmp_path: Path, answer: Answer) -> None:
        package = pytest.importorskip("huggingface_hub")
        server.answers[RESOLVE] = answer
        server.answers[f"/api/resolve-cache/models/Qwen/Qwen3-1.7B/{COMMIT}/config.json"] = sending(QWEN)
        asked = package.HfApi(endpoint=server.address, token=False)
        kept = asked.hf_hub_download("Qwen/Qwen3-1.7B", "config.json", cache_dir=hub.cache())
        assert read_config_file("Qwen/Qwen3-1.7B", offline=True).path == kept
        shutil.rmtree(hub.cache())
        ours = read_config_file("Qwen/Qwen3-1.7B").path
        assert ours == package.try_to_load_from_cache("Qwen/Qwen3-1.7B", "config.json", cache_dir=hub.cache())

    @pytest.mark.parametrize(
        ("answer", "error", "said"),
        [
            (refusing(401, "GatedRepo"), "GatedRepoError", "is gated"),
            (refusing(403, "GatedRepo"), "GatedRepoError", "is gated"),
            (refusing(401, "RepoNotFound"), "RepositoryNotFoundError", "nor a model of that name"),
            (refusing(404, "RevisionNotFound"), "RevisionNotFoundError", "has no revision"),
            (refusing(404, "EntryNotFound"), "RemoteEntryNotFoundError", "has no config.json"),
            (refusing(401, message=EXPIRED), "HfHubHTTPError", "does not know your token"),
            (refusing(403, message=DISABLED), "DisabledRepoError", "was disabled"),
            (refusing(403), "HfHubHTTPError", "forbids"),
        ],
    )
    def test_each_refusal_is_the_same_to_both(self, server: Hub, answer: Answer, error: str, said: str) -> None:
        package = pytest.importorskip("huggingface_hub")
        server.answers[RESOLVE] = answer
        with pytest.raises(package.errors.HfHubHTTPError) as caught:
            package.get_hf_file_metadata(f"{server.address}{RESOLVE}", token=False)
        assert type(caught.value).__name__ == error
        assert said in refused("Qwen/Qwen3-1.7B")

    def test_models_are_listed_by_the_same_query(self, server: Hub) -> None:
        package = pytest.importorskip("huggingface_hub")
        server.answers["/api/models"] = lambda handler: handler.send(200, b'[{"id": "Qwen/Qwen3-1.7B"}]')
        assert "did you mean Qwen/Qwen3-1.7B" in refused("Qwen/Qwen3-1.7")
        asked = package.HfApi(endpoint=server.address, token=False)
        assert [one.id for one in asked.list_models(search="Qwen3", author="Qwen", limit=200)] == ["Qwen/Qwen3-1.7B"]
        ours, theirs = (parse_qs(urlsplit(path).query) for path, _ in server.asked[-2:])
        assert ours == theirs

    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"XDG_CACHE_HOME": "/c"},
            {"XDG_CACHE_HOME": "/c", "HF_HOME": "$HOME/h"},
            {"HF_HOME": "~/h", "HUGGINGFACE_HUB_CACHE": "/old"},
            {"HF_HUB_CACHE": "/new", "HUGGINGFACE_HUB_CACHE": "/old", "HF_TOKEN_PATH": "~/t"},
            {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "1"},
            {"TRANSFORMERS_OFFLINE": "yes"},
        ],
    )
    def test_settings_of_the_environment_mean_the_same(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: dict[str, str]
    ) -> None:
        package = pytest.importorskip("huggingface_hub")
        for name in SETTINGS:
            monkeypatch.delenv(name, raising=False)
        for name, value in {"HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:1", **settings}.items():
            monkeypatch.setenv(name, value)
        theirs = runpy.run_path(str(Path(package.__file__).with_name("constants.py")))
        assert str(hub.cache()) == theirs["HF_HUB_CACHE"]
        with pytest.raises(CatalogError) as caught:
            hub.configuration(HubModel("Qwen/Qwen3-1.7B"))
        assert ("OFFLINE is set" in str(caught.value)) == theirs["HF_HUB_OFFLINE"]
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(Path, "read_text", lambda path, **_: str(path))
        assert hub._token() == theirs["HF_TOKEN_PATH"]


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("Qwen/Qwen3-1.7B", HubModel("Qwen/Qwen3-1.7B")),
        ("Qwen/Qwen3-1.7B@v1.0", HubModel("Qwen/Qwen3-1.7B", "v1.0")),
        ("gpt2", None),
        ("a/b/c", None),
        ("../secret", None),
        ("a/b@../../c", None),
        ("configs/model.json", None),
        ("/etc/passwd", None),
    ],
)
def test_a_name_on_the_hub_is_owner_and_name(text: str, model: HubModel | None) -> None:
    assert hub_model(text) == model
    assert model is None or looks_like_path(text)


class TestPublished:
    @pytest.mark.parametrize("name", [name for name, entry in PUBLISHED.items() if "parameters" in entry])
    def test_the_formula_counts_the_parameters_that_are_published(self, name: str) -> None:
        entry = PUBLISHED[name]
        config = entry["config"]
        assert isinstance(config, dict)
        assert count_parameters(shape_from_hf_config(config, name)) == entry["parameters"]

    @pytest.mark.slow
    @pytest.mark.parametrize("name", [name for name, entry in PUBLISHED.items() if "parameters" in entry])
    def test_transformers_builds_as_many(self, name: str) -> None:
        torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers", "5")
        config = PUBLISHED[name]["config"]
        assert isinstance(config, dict)
        kind = getattr(transformers, config["architectures"][0])
        with torch.device("meta"):
            built = kind(kind.config_class.from_dict(dict(config)))
        assert sum(parameter.numel() for parameter in built.parameters()) == PUBLISHED[name]["parameters"]

    @pytest.mark.parametrize("name", [name for name, entry in PUBLISHED.items() if "no_formula" in entry])
    def test_another_architecture_gets_a_sentence_and_no_number(self, name: str) -> None:
        config = PUBLISHED[name]["config"]
        assert isinstance(config, dict)
        with pytest.raises(NoClosedFormError) as caught:
            shape_from_hf_config(config, name)
        assert str(PUBLISHED[name]["no_formula"]) in str(caught.value)
