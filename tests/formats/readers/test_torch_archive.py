"""Files of torch.export: what is read, and what is refused because reading it would run it."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tvm

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.formats.readers import import_torch

torch = pytest.importorskip("torch", reason="pip install torch")

from torch_models import ResidualNet, make  # noqa: E402

#: what a prepared file creates if it gets to run
FLAG = "executed"


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    """A file of torch.export.save, its batch size symbolic."""
    path = tmp_path_factory.mktemp("torch") / "model.pt2"
    module, example = make(ResidualNet).eval(), torch.zeros(2, 3, 8, 8)
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    torch.export.save(torch.export.export(module, (example,), dynamic_shapes=shapes), path)
    return path


def rewrite(source: Path, target: Path, edit: Callable[[dict[str, bytes]], None]) -> Path:
    """A copy of an archive whose records `edit` changed; names without the top folder."""
    with zipfile.ZipFile(source) as old:
        records = {name.partition("/")[2]: old.read(name) for name in old.namelist()}
    edit(records)
    with zipfile.ZipFile(target, "w") as new:
        for name, data in records.items():
            new.writestr(f"model/{name}", data)
    return target


def edit_json(name: str, edit: Callable[[dict], None]) -> Callable[[dict[str, bytes]], None]:
    """Change of one JSON record."""

    def change(records: dict[str, bytes]) -> None:
        content = json.loads(records[name])
        edit(content)
        records[name] = json.dumps(content).encode()

    return change


def edit_graph(edit: Callable[[dict], None]) -> Callable[[dict[str, bytes]], None]:
    return edit_json("models/model.json", lambda content: edit(content["graph_module"]))


class Attack:
    """Unpickling it creates a file."""

    def __reduce__(self):
        return open, (FLAG, "w")


def test_archive__computes_what_the_module_computes(archive):
    mod, params = import_torch(archive)
    assert params == {}
    x = torch.randn(3, 3, 8, 8)
    (actual,) = rq.reference.run(mod, [x.numpy()])
    expected = make(ResidualNet).eval()(x).detach().numpy()
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_sample_inputs__are_not_unpickled(archive, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def replace_inputs(records):
        records["data/sample_inputs/model.pt"] = pickle.dumps(Attack())

    path = rewrite(archive, tmp_path / "a.pt2", replace_inputs)
    import_torch(path)
    assert not Path(FLAG).exists()


def test_guards__are_not_run(archive, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def add_guard(content):
        content["guards_code"] = [f"open({FLAG!r}, 'w')"]

    path = rewrite(archive, tmp_path / "a.pt2", edit_json("models/model.json", add_guard))
    import_torch(path)
    assert not Path(FLAG).exists()


def pickle_weight(records):
    config = "data/weights/model_weights_config.json"
    content = json.loads(records[config])
    entry = content["config"]["fc.bias"]
    entry["use_pickle"] = True
    buffer = io.BytesIO()
    torch.save(Attack(), buffer)
    records["data/weights/" + entry["path_name"]] = buffer.getvalue()
    records[config] = json.dumps(content).encode()


def store_object(records):
    records["data/constants/opaque_obj_0"] = pickle.dumps(Attack())
    records["data/constants/model_constants_config.json"] = json.dumps(
        {
            "config": {
                "thing": {
                    "path_name": "opaque_obj_0",
                    "is_param": False,
                    "use_pickle": True,
                    "tensor_meta": None,
                }
            }
        }
    ).encode()


def evaluate_size(graph):
    graph["graph"]["tensor_values"]["x"]["sizes"][0] = {
        "as_expr": {"expr_str": f"open('{FLAG}', 'w')", "hint": {"as_int": 2}}
    }


def call(target: str):
    return edit_graph(lambda graph: graph["graph"]["nodes"][0].update(target=target))


def inject_name(graph):
    name = f"relu\n    open({FLAG!r}, 'w')\n    y"
    graph["graph"]["nodes"][-1]["outputs"][0]["as_tensor"]["name"] = name


def inject_path(graph):
    spec = next(spec for spec in graph["signature"]["input_specs"] if "parameter" in spec)
    spec["parameter"]["parameter_name"] = f'a") or open("{FLAG}", "w'


def import_enum(graph):
    spec = json.loads(graph["module_call_graph"][0]["signature"]["in_spec"])
    spec[1]["context"] = json.dumps({"__enum__": True, "fqn": "antigravity:a", "name": "b"})
    graph["module_call_graph"][0]["signature"]["in_spec"] = json.dumps(spec)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (pickle_weight, "'fc.bias' is stored as a pickle"),
        (store_object, "'thing' is stored as a pickle"),
        (edit_graph(evaluate_size), "is not a symbolic size"),
        (call("torch.os.system"), "calls 'torch.os.system', which is not an operator on tensors"),
        (call("torch.ops.load_library"), "calls 'torch.ops.load_library'"),
        (call("torch.ops.aten.from_file.default"), "calls 'torch.ops.aten.from_file.default'"),
        (call("torch.ops.aten.nothing.default"), "calls 'torch.ops.aten.nothing.default'"),
        (call("torch.ops.aten.__class__.mro"), "calls 'torch.ops.aten.__class__.mro'"),
        (edit_graph(inject_name), "is not a name"),
        (edit_graph(inject_path), "is not a name"),
        (edit_graph(import_enum), "is not a name of an input or output"),
    ],
)  # fmt: skip
def test_code_in_a_file__refused(archive, tmp_path, monkeypatch, edit, message):
    monkeypatch.chdir(tmp_path)
    path = rewrite(archive, tmp_path / "a.pt2", edit)
    with pytest.raises(ModelError, match=message):
        import_torch(path)
    assert not Path(FLAG).exists()


def absurd_shape(content):
    content["config"]["fc.bias"]["tensor_meta"]["sizes"] = [{"as_int": 2**60}]


def escape_folder(content):
    content["config"]["fc.bias"]["path_name"] = "../weight_0"


def larger_than_stored(content):
    content["config"]["fc.bias"]["tensor_meta"]["sizes"] = [{"as_int": 500}]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (absurd_shape, "'fc.bias' has an impossible shape"),
        (escape_folder, "which is not a file name"),
        (larger_than_stored, "torch.export cannot load"),
    ],
)
def test_tensor_that_cannot_be__refused(archive, tmp_path, edit, message):
    change = edit_json("data/weights/model_weights_config.json", edit)
    with pytest.raises(ModelError, match=message):
        import_torch(rewrite(archive, tmp_path / "a.pt2", change))


def test_missing_record__named(archive, tmp_path):
    path = rewrite(archive, tmp_path / "a.pt2", lambda records: records.pop("models/model.json"))
    with pytest.raises(ModelError, match=r"no record 'models/model.json'.*Save it again"):
        import_torch(path)


def test_large_file__refused(archive):
    with pytest.raises(ModelError, match="more than the limit of 1000"):
        import_torch(archive, max_bytes=1000)


def test_damaged_file__one_clear_error_each(archive, tmp_path):
    good = archive.read_bytes()
    rng = np.random.default_rng(0)
    path = tmp_path / "a.pt2"
    refused = 0
    for i in range(100):
        data = bytearray(good)
        if i % 2:
            data = data[: int(rng.integers(1, len(good)))]
        else:
            for at in rng.integers(0, len(good), 3):
                data[at] ^= int(rng.integers(1, 256))
        path.write_bytes(bytes(data))
        try:
            import_torch(path)
        except ModelError:
            refused += 1
    # Padding between records and their dates may be anything.
    assert refused > 80


def test_load__takes_a_program(archive):
    program = torch.export.load(archive)
    tvm.ir.assert_structural_equal(rq.load(program)[0], rq.load(archive)[0])
    with pytest.raises(ModelError, match="shapes= does not apply to a ExportedProgram"):
        rq.load(program, shapes={"x": (1, 3, 8, 8)})
    with pytest.raises(ModelError, match="is a module, not an exported program"):
        rq.load(make(ResidualNet))


def test_module__told_from_a_program():
    with pytest.raises(ModelError, match=r"is a module, not an exported program"):
        import_torch(make(ResidualNet))


def test_older_torch__is_refused(monkeypatch):
    program = torch.export.export(torch.nn.ReLU(), (torch.zeros(2),))
    monkeypatch.setattr(torch, "__version__", "2.8.0+cpu")
    with pytest.raises(
        rq.errors.MissingDependencyError, match=r"needs PyTorch 2\.9 or later.*2\.8\.0"
    ):
        rq.load(program)


def test_archive_without_plain_weights__says_so(tmp_path):
    """What torch.export.save of PyTorch 2.8 writes has these records."""
    with zipfile.ZipFile(tmp_path / "old.pt2", "w") as archive:
        archive.writestr("model/models/model.json", b'{"graph_module": {"module_call_graph": []}}')
        archive.writestr("model/data/weights/model.pt", b"")
    with pytest.raises(ModelError, match=r"PyTorch before 2\.9 keeps weights in a pickle"):
        rq.load(str(tmp_path / "old.pt2"))


def test_archive_of_an_older_release__says_so(tmp_path):
    """What torch.export.save of PyTorch 2.6 writes has these records."""
    names = ("serialized_exported_program.json", "serialized_state_dict.pt", "version")
    with zipfile.ZipFile(tmp_path / "old.pt2", "w") as archive:
        for name in names:
            archive.writestr(name, b"{}")
    with pytest.raises(ModelError, match=r"or one of PyTorch before 2\.8\. Save it again"):
        rq.load(str(tmp_path / "old.pt2"))
