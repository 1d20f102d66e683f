"""The instructions that decode two words at once, carried out one by one for every word."""

import re

import pytest
import torch

from baton_kernels import code_pairs
from baton_kernels.reference.grouped_linear import E2M1

WORDS = torch.arange(1 << 16)
# Registers hold a word in each half, as the kernel packs them: here a word and the one before it.
PAIRS = WORDS | (WORDS.roll(1) << 16)


def halves(register: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the two numbers of registers, [registers, 2]."""
    return torch.stack((register & 0xFFFF, register >> 16), dim=-1).to(torch.uint16).view(dtype)


def joined(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    bits = numbers.to(dtype).view(torch.uint16).long()
    return bits[:, 0] | (bits[:, 1] << 16)


def run(text: str, operands: dict[str, torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Carry out PTX and return the numbers of $0 to $3, [registers, 2] each. Each product or sum is rounded once."""
    registers = dict(operands)
    pair = "bf16x2" if dtype == torch.bfloat16 else "f16x2"

    def value(name: str) -> torch.Tensor:
        return registers[name] if name in registers else torch.tensor(int(name, 0)).expand(len(PAIRS))

    for line in re.findall(r"^\s*(\w[\w.]*)\s+([^;{}]+);", text, re.MULTILINE):
        name, (to, *names) = line[0], [each.strip() for each in line[1].split(",")]
        if name.startswith("reg") or line[1].startswith(".b32"):
            continue
        sources = [value(each) for each in names[:3]]
        if name == "lop3.b32":
            assert names[3] == "0xea", "the table of (a & b) | c"
            registers[to] = (sources[0] & sources[1]) | sources[2]
        elif name == "and.b32":
            registers[to] = sources[0] & sources[1]
        elif name in ("shr.u32", "shl.b32"):
            shifted = sources[0] >> sources[1] if name == "shr.u32" else sources[0] << sources[1]
            registers[to] = shifted & 0xFFFFFFFF
        elif name == "mov.b32":
            registers[to] = sources[0]
        elif name == f"fma.rn.{pair}":
            one, other, third = (halves(each, dtype).double() for each in sources)
            registers[to] = joined(one * other + third, dtype)
        else:
            assert name in (f"sub.{pair}", f"mul.{pair}"), name
            one, other = (halves(each, dtype).double() for each in sources)
            registers[to] = joined(one - other if name.startswith("sub") else one * other, dtype)
    return [halves(registers[f"${number}"], dtype) for number in range(4)]


def constants(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return registers that hold a number twice."""
    return joined(numbers[:, None].expand(-1, 2), dtype)


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int4(dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    zeros = torch.randint(0, 17, (len(WORDS),)).double()
    scales = torch.randn(len(WORDS))
    if dtype == torch.float16:
        # No scale of a weight is so small that float16 has fewer bits for it.
        scales += scales.sign() * 0.01
    scales = scales.to(scale_dtype).double()
    base, coarse = 128 if dtype == torch.bfloat16 else 1024, scales.to(dtype).double()
    numbers = {"$5": base + zeros, "$6": coarse, "$7": scales - coarse}
    name = f"_INT4_{str(dtype)[6:].upper()}" + ("_FINE" if dtype != scale_dtype else "")
    operands = {"$4": PAIRS, **{register: constants(each, dtype) for register, each in numbers.items()}}
    for number, ours in enumerate(run(getattr(code_pairs, name).value, operands, dtype)):
        for half, words in enumerate((WORDS, WORDS.roll(1))):
            expected = (((words >> 4 * number) & 15) - zeros) * scales
            assert torch.equal(ours[:, half], expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int4_without_scales(dtype: torch.dtype) -> None:
    zeros = torch.randint(0, 17, (len(WORDS),)).double()
    operands = {"$4": PAIRS, "$5": constants(zeros + (128 if dtype == torch.bfloat16 else 1024), dtype)}
    text = getattr(code_pairs, f"_INT4_{str(dtype)[6:].upper()}_UNSCALED").value
    for number, ours in enumerate(run(text, operands, dtype)):
        for half, words in enumerate((WORDS, WORDS.roll(1))):
            assert torch.equal(ours[:, half].double(), ((words >> 4 * number) & 15) - zeros)


def test_e2m1() -> None:
    exponents, dtype = torch.randint(0, 129, (len(WORDS),)).double(), torch.bfloat16
    # The kernel takes 2 ** 126 times the scale 2 ** (exponent - 127).
    found = run(code_pairs._E2M1.value, {"$4": PAIRS, "$5": constants(2 ** (exponents - 1), dtype)}, dtype)
    table = torch.tensor(E2M1).double()
    for number, ours in enumerate(found):
        for half, words in enumerate((WORDS, WORDS.roll(1))):
            expected = (table[(words >> 4 * number) & 15] * 2 ** (exponents - 127)).bfloat16()
            assert torch.equal(ours[:, half].view(torch.uint16), expected.view(torch.uint16))


def test_e2m1_in_halves() -> None:
    dtype, table = torch.bfloat16, torch.tensor(E2M1).double()
    # Of the first two codes of a word, and of the last two.
    scales = [torch.randint(127, (len(WORDS),)).to(torch.uint8).view(torch.float8_e4m3fn).double() for _ in range(2)]
    # The kernel takes 2 ** 118 times the scales.
    registers = {name: constants(scale * 2.0**118, dtype) for name, scale in zip(("$5", "$6"), scales, strict=True)}
    for number, ours in enumerate(run(code_pairs._E2M1_HALVES.value, {"$4": PAIRS, **registers}, dtype)):
        for half, words in enumerate((WORDS, WORDS.roll(1))):
            exact = table[(words >> 4 * number) & 15] * scales[number // 2]
            assert torch.equal(ours[:, half].double() * 256, exact)
