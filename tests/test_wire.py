from __future__ import annotations

import struct

import pytest
import torch

import laconic
import laws
import mutate
from laconic import FrameError, InputError, Packet, TensorSpec, wire


def frame(x=None, spec="qsgd:4"):
    return laconic.encode(laws.normal(300) if x is None else x, spec)


def test_header_has_the_bytes_of_the_format():
    x = torch.zeros(2, 3)
    x[1, 2] = 1.5
    blob = laconic.encode(x, "topk:0.1")
    magic, version, flags, dtype, ndim, text, sections, zero, payload, _ = struct.unpack_from("<4sBBBBHBBQI", blob)
    assert (magic, version, flags, zero) == (b"LACO", 1, 0, 0)
    assert (dtype, ndim, text, sections) == (1, 2, 8, 2)
    assert struct.unpack_from("<4I", blob, 24) == (2, 3, 9, 4)
    assert blob[40:48] == b"topk:0.1"
    assert len(blob) % 16 == payload % 16
    assert mutate.Frame.read(blob).write() == blob


@pytest.mark.parametrize(
    "code, dtype", [(1, torch.float32), (2, torch.float64), (3, torch.float16), (4, torch.bfloat16)]
)
def test_dtypes_have_their_codes(code, dtype):
    assert frame(torch.ones(3, dtype=dtype))[6] == code


def test_sections_start_at_multiples_of_16():
    blob = frame(laws.normal(300), "topk:0.1|qsgd:4")
    base = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    for section in wire.unpack(base).sections:
        assert (section.data_ptr() - base.data_ptr()) % 16 == 0


@pytest.mark.parametrize("shape", [(0, 2**33), (2**40, 0, 3)])
def test_sizes_beyond_32_bits_set_the_wide_flag(shape):
    blob = laconic.encode(torch.empty(shape), "qsgd:4")
    assert blob[5] == 2
    assert laconic.decode(blob).shape == shape


def test_small_wide_frame_decodes():
    small = mutate.Frame.read(frame())
    small.wide = True
    assert laws.same_bits(laconic.decode(small.write()), laconic.decode(frame()))


def test_16_dimensions_are_the_limit():
    x = laws.normal(*(1,) * 15, 3)
    assert laconic.decode(frame(x, "none")).shape == x.shape
    with pytest.raises(InputError, match="at most 16 dimensions, got 17"):
        laconic.encode(torch.ones((1,) * 17), "none")


@pytest.mark.parametrize("version", [0, 2, 255])
def test_other_version_raises_frame_error(version):
    other = mutate.Frame.read(frame())
    other.version = version
    with pytest.raises(FrameError, match=f"format version {version}, this laconic reads version 1"):
        laconic.decode(other.write())


def test_other_magic_raises_frame_error():
    with pytest.raises(FrameError, match=r"starts with b'LACO', this starts with b'\\x89PNG'"):
        laconic.decode(b"\x89PNG" + bytes(100))


@pytest.mark.parametrize("nbytes", [0, 1, 4, 23])
def test_less_than_a_header_raises_frame_error(nbytes):
    with pytest.raises(FrameError, match=f"at least 24 bytes, got {nbytes}"):
        laconic.decode(b"LACO" + bytes(nbytes - 4) if nbytes >= 4 else bytes(nbytes))


def tampered(**changes):
    it = mutate.Frame.read(frame())
    for name, value in changes.items():
        setattr(it, name, value)
    return it.write()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"flags": 4}, "unknown flags"),
        ({"zero": 1}, "unknown flags"),
        ({"dtype": 9}, "unknown dtype code 9; known: 1, 2, 3, 4"),
        ({"shape": [1] * 17}, "17 dimensions, at most 16"),
        ({"sections": [b""] * 9}, "9 sections, at most 8"),
        ({"spec": b""}, "1 to 256 bytes"),
        ({"spec": b"qsgd:4" + b" " * 251}, "1 to 256 bytes"),
        ({"spec": b"\xc3\xa9"}, "ASCII"),
        ({"spec": b"qsgd:bits=4"}, "'qsgd:bits=4', whose canonical spec is 'qsgd:4'"),
        ({"spec": b"qsgd:4,bucket=512"}, "whose canonical spec is 'qsgd:4'"),
        ({"spec": b"gzip"}, "codec that this laconic cannot read.*unknown stage 'gzip'"),
        ({"spec": b"ef|qsgd:4"}, "cannot read"),
        ({"payload": 7}, "do not add up to the payload of 7 bytes"),
        ({"payload_crc": 1}, "payload does not match its checksum"),
        ({"header_crc": 1}, "header does not match its checksum"),
        ({"lengths": [12, 2**31]}, "do not add up to the payload"),
        ({"header_padding": b"\x01"}, "padding"),
        ({"sections": [bytes(12)]}, "has 2 sections, the frame 1"),
        ({"sections": [bytes(4), bytes(151)]}, r"codes 300 values in \(4, 150\) bytes, the frame has \(4, 151\)"),
        ({"shape": [301]}, "codes 301 values"),
        ({"dtype": 19}, "does not carry torch.int32"),
        ({"tail": b"\x00"}, "payload bytes and has"),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_header_field_is_named(changes, message):
    with pytest.raises(FrameError, match=message):
        laconic.decode(tampered(**changes))


def test_nonzero_padding_raises_frame_error():
    it = mutate.Frame.read(frame(laws.normal(300), "qsgd:4"))
    it.payload_padding = 0x55
    with pytest.raises(FrameError, match="padding"):
        laconic.decode(it.write())


def test_values_beyond_max_numel_raise_before_allocation():
    assert laconic.decode(frame(), max_numel=300).shape == (300,)
    with pytest.raises(FrameError, match="declares 300 values, more than the 299 allowed"):
        laconic.decode(frame(), max_numel=299)
    claim = mutate.Frame([2**20, 2**15], [], b"topk:0.01")
    with pytest.raises(FrameError, match=f"declares {2**35} values"):
        laconic.decode(claim.write())
    with pytest.raises(InputError, match="at most 2\\^34 values"):
        wire.pack(Packet("topk:0.01", TensorSpec((2**20, 2**15), torch.float32), ()))


@pytest.mark.parametrize("shape", [(0, 2**63), (0, 2**64 - 1), (0, 2**62, 2**62)])
def test_impossible_sizes_raise_input_error(shape):
    it = mutate.Frame([*shape], [], b"qsgd:4", wide=True)
    with pytest.raises(FrameError):
        laconic.decode(it.write())


def test_like_with_another_shape_or_dtype_raises_frame_error():
    assert laconic.decode(frame(), like=torch.empty(300)).shape == (300,)
    with pytest.raises(FrameError, match=r"expected \[299\] of torch.float32, the frame holds \[300\]"):
        laconic.decode(frame(), like=torch.empty(299))
    with pytest.raises(FrameError, match=r"torch.float64, the frame holds \[300\] of torch.float32"):
        laconic.decode(frame(), like=torch.empty(300, dtype=torch.float64))


@pytest.mark.parametrize("x", [laws.normal(6), torch.zeros(6)], ids=["values", "zeros"])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (6, 1), ()])
def test_out_of_another_shape_raises_and_is_unchanged(x, shape):
    out = torch.full(shape, 7.0)
    with pytest.raises(FrameError, match=r"the frame holds \[6\]"):
        laconic.decode(frame(x), out=out)
    assert bool((out == 7).all())


@pytest.mark.parametrize("blob", ["text", 3, None, [1, 2], torch.zeros(64), torch.zeros(4, 16, dtype=torch.uint8)])
def test_object_without_buffer_raises_input_error(blob):
    with pytest.raises(InputError):
        laconic.decode(blob)


def test_encoding_into_a_read_only_buffer_raises_input_error():
    with pytest.raises(InputError, match="read-only"):
        laconic.encode_into(torch.ones(4), "none", bytes(1000))
    with pytest.raises(InputError, match="uint8"):
        laconic.encode_into(torch.ones(4), "none", torch.zeros(1000))


def test_encoding_a_non_tensor_raises_input_error():
    for call in (lambda: laconic.encode([1.0], "none"), lambda: laconic.encode_into([1.0], "none", bytearray(99))):
        with pytest.raises(InputError, match="expected a tensor, got list"):
            call()


def test_bundle_keeps_names_order_and_tensors():
    tensors = {
        "layer.1/weight": laws.normal(30, 20), "": laws.normal(5), "ŝlot ✓ 層": laws.normal(3, 3).bfloat16(),
        "empty": torch.empty(0, 7), "zero": torch.zeros(100), "x" * 1024: torch.tensor(2.0),
    }  # fmt: skip
    decoded = laconic.decode_bundle(laconic.encode_bundle(tensors, "none"))
    assert list(decoded) == list(tensors)
    for name, x in tensors.items():
        assert laws.same_bits(decoded[name], x), name


def test_bundle_holds_the_frames_unchanged():
    tensors = {"a": laws.normal(100), "b": laws.normal(7, 7)}
    blob = laconic.encode_bundle(tensors, "topk:0.1|qsgd:4", seed=3)
    frames = wire.unpack_bundle(blob)
    assert [name for name, _ in frames] == ["a", "b"]
    for name, view in frames:
        assert bytes(view.tolist()) == laconic.encode(tensors[name], "topk:0.1|qsgd:4", seed=3)


def test_empty_bundle_decodes():
    assert laconic.decode_bundle(laconic.encode_bundle({}, "none")) == {}


def test_frame_as_bundle_and_bundle_as_frame_raise():
    with pytest.raises(FrameError, match=r"got a bundle: read it with laconic\.decode_bundle"):
        laconic.decode(laconic.encode_bundle({"a": laws.normal(3)}, "none"))
    with pytest.raises(FrameError, match=r"expected a bundle.*read a single frame with laconic\.decode"):
        laconic.decode_bundle(frame())


def test_duplicate_name_raises_frame_error():
    blob = wire.pack_bundle([("a", frame()), ("b", frame()), ("a", frame())])
    with pytest.raises(FrameError, match="holds 'a' twice"):
        laconic.decode_bundle(blob)


def test_name_beyond_1024_bytes_raises_input_error():
    with pytest.raises(InputError, match="at most 1024 bytes, got 1026"):
        laconic.encode_bundle({"ß" * 513: laws.normal(3)}, "none")


def test_nested_bundle_raises_frame_error():
    inner = laconic.encode_bundle({"a": laws.normal(3)}, "none")
    with pytest.raises(FrameError, match="bundle"):
        laconic.decode_bundle(wire.pack_bundle([("b", inner)]))


def test_max_numel_limits_the_whole_bundle():
    blob = laconic.encode_bundle({"a": laws.normal(30), "b": laws.normal(40)}, "none")
    assert len(laconic.decode_bundle(blob, max_numel=70)) == 2
    with pytest.raises(FrameError, match="declares 40 values, more than the 39 allowed"):
        laconic.decode_bundle(blob, max_numel=69)


def test_damaged_bundle_raises_frame_error():
    blob = laconic.encode_bundle({"a": laws.normal(9), "b": laws.normal(3)}, "fp16")
    for end in range(len(blob)):
        with pytest.raises(FrameError):
            laconic.decode_bundle(blob[:end])
    for bit in range(8 * len(blob)):
        flipped = bytearray(blob)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            laconic.decode_bundle(flipped)


def test_dimensions_beside_a_zero_must_multiply_to_at_most_2_to_the_62():
    shapes = {
        (0, 1 << 33, 1 << 33): False,
        (1 << 33, 1 << 33, 0): False,
        (0, 1 << 48, 1 << 14): True,
        (0, 1 << 33): True,
    }
    for shape, valid in shapes.items():
        frame = mutate.Frame(list(shape), [], b"none", wide=True).write()
        if valid:
            assert tuple(laconic.decode(frame).shape) == shape
        else:
            with pytest.raises(FrameError, match=r"multiply, without zeros, to more than 2\^62"):
                laconic.decode(frame)
    with pytest.raises(InputError, match="without zeros"):
        wire.pack(Packet("none", TensorSpec((0, 1 << 33, 1 << 33), torch.float32), ()))
