"""The legacy layout's class records are cut without touching what stands around them."""

import io

import torch
from torch import nn

from floorplan.store.legacy import without_module_records


def test_records_go_and_everything_else_stays() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Sequential(nn.Conv2d(3, 3, 1)))
    net.module = nn.Identity()  # the string 'module' also heads the records that are cut
    buffer = io.BytesIO()
    torch.save(net, buffer, _use_new_zipfile_serialization=False)
    bare = without_module_records(buffer)
    assert b"class Sequential" in buffer.getvalue() and b"class Sequential" not in bare.read()
    bare.seek(0)
    with torch.serialization.safe_globals(list({type(m) for m in net.modules()})):
        loaded = torch.load(bare, weights_only=True)
    assert list(dict(loaded.named_modules())) == list(dict(net.named_modules()))
    for a, b in zip(loaded.parameters(), net.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_file_without_records_is_left_as_it_is() -> None:
    buffer = io.BytesIO()
    torch.save({"module": (torch.ones(3), "module")}, buffer, _use_new_zipfile_serialization=False)
    assert without_module_records(buffer).read() == buffer.getvalue()
