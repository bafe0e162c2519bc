"""Peak rates, memory and links by device. A device that is not here has no MFU: never another device's peak.

Rates are dense, in TFLOP/s, of matrix products that add up in float32; where a data sheet prints the rate with 2:4
sparsity it is halved. Most can be checked: compute units x FLOPs a cycle and unit x boost clock.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """What a maker's data sheet says of one device, as PyTorch counts devices."""

    name: str
    """Words of the name that the device gives itself."""
    bf16_tflops: float
    fp8_tflops: float | None
    """None: no float8 units."""
    memory_gb: float
    """10^9 bytes."""
    memory_tb_per_s: float
    link_gb_per_s: float
    """To the other devices of its node, in one direction: NVLink or Infinity Fabric, else PCIe."""

    def peak_flops(self, *, float8: bool = False) -> float | None:
        """Dense peak in FLOP/s."""
        tflops = self.fp8_tflops if float8 else self.bf16_tflops
        return None if tflops is None else tflops * 1e12


DEVICES = (
    # A100 data sheet (NVIDIA, 2021): 312 | 624 sparse; NVLink 600 GB/s both ways together; PCIe 4: 64.
    Device("A100", 312, None, 40, 1.555, 300),
    Device("A100 40GB", 312, None, 40, 1.555, 300),
    Device("A100 80GB", 312, None, 80, 2.039, 300),
    Device("A100 PCIe 40GB", 312, None, 40, 1.555, 32),
    Device("A100 PCIe 80GB", 312, None, 80, 1.935, 32),
    # H100 data sheet (2023), printed sparse: SXM 1,979, PCIe 1,513, NVL 1,671 a GPU; float8 twice that.
    # NVLink 900 (SXM) and 600 (NVL's bridge) GB/s; PCIe 5: 128.
    Device("H100", 989, 1979, 80, 3.35, 450),
    Device("H100 PCIe", 756, 1513, 80, 2.0, 64),
    Device("H100 NVL", 835, 1670, 94, 3.9, 300),
    # H200 data sheet (2024), printed sparse: SXM 1,979, NVL 1,671. Both have 900 GB/s of NVLink.
    Device("H200", 989, 1979, 141, 4.8, 450),
    Device("H200 NVL", 835, 1670, 141, 4.8, 450),
    # For China: H20 with fewer units and full NVLink; H800, an H100 with 400 GB/s of NVLink.
    Device("H20", 148, 296, 96, 4.0, 450),
    Device("H800", 989, 1979, 80, 3.35, 200),
    Device("H800 PCIe", 756, 1513, 80, 2.0, 64),
    # GH200 data sheet (2024): one H100 or H200 die beside a Grace CPU. The figure in its name is the CPU's memory
    # (480 or 120 GB) with 96 GB of HBM3, or 144 GB of HBM3e.
    Device("GH200", 989, 1979, 96, 4.0, 450),
    Device("GH200 144G", 989, 1979, 144, 4.9, 450),
    # Blackwell architecture technical brief, tables 1 to 3 (2024), and the HGX B300 and GB300 NVL72 data sheets (2025),
    # each divided by its number of GPUs: HGX 4.5 sparse PFLOP/s a GPU, NVL72 5. NVLink 1,800 GB/s.
    Device("B200", 2250, 4500, 180, 7.7, 900),
    Device("B300", 2250, 4500, 270, 7.7, 900),
    Device("GB200", 2500, 5000, 186, 8.0, 900),
    Device("GB300", 2500, 5000, 279, 8.0, 900),
    # L40 and L40S data sheets (2023), whose columns are "dense | sparse": 181.05 | 362.1 and 362.05 | 733. An L40S has
    # the L40's 568 tensor cores at twice their rate with float32 sums: 568 x 256 x 2.52 GHz = 366. (Some tables take
    # its 362 for the sparse figure.)
    Device("L40", 181.05, 362, 48, 0.864, 32),
    Device("L40S", 362.05, 733, 48, 0.864, 32),
    # RTX A6000 data sheet (2020): 309.7 sparse.
    Device("RTX A6000", 154.8, None, 48, 0.768, 32),
    # Ada (2022) and RTX Blackwell (2025) architecture papers, appendix A: half rate with float32 sums.
    Device("RTX 4090", 165.2, 330.3, 24, 1.008, 32),
    Device("RTX 5090", 209.5, 419, 32, 1.792, 64),
    # MI250X data sheet (AMD, 2021): 383 for two dies, which PyTorch sees as two devices. Four links of 50 GB/s a die.
    Device("MI250X", 191.5, None, 64, 1.6, 200),
    # MI300X (2023) and MI325X (2024) data sheets, 304 units x 2,048 x 2.1 GHz; seven links of 64 GB/s each way.
    Device("MI300X", 1307.4, 2614.9, 192, 5.3, 448),
    Device("MI325X", 1307.4, 2614.9, 256, 6.0, 448),
    # CDNA 4 white paper (2025): 256 units x 4,096 at 2.2 and 2.4 GHz; seven links of 76.8 GB/s each way.
    Device("MI350X", 2306.9, 4613.7, 288, 8.0, 537.6),
    Device("MI355X", 2516.6, 5033.2, 288, 8.0, 537.6),
)

# Words that tell no device from another of its name. "Laptop", "D", "Max-Q", "MIG", a virtual GPU's "20C" and the like
# are not among them: such a device has another peak, or a share of one. Nor is "MI250" beside "MI250X", the one name of
# two devices, of which the MI250 has 104 units a die and not 110; nor HBM2e, an H100's that is no SXM module.
_NOISE = re.compile(
    r"nvidia|amd|instinct|geforce|tesla|graphics|gpu|sxm\d?|oam|vf|ac|hbm3e?"
    r"|(24|32|40|48|80|94|96|120|141|180|192|256|288|480)gb"
)


def find_device(name: str) -> Device | None:
    """The row of the device that calls itself `name` (torch.cuda.get_device_name), or None if it is unknown.

    Of the rows whose words all occur in the name the longest wins, so that an "H100 NVL" is not taken for an H100; and
    a word that neither the row nor common usage explains makes it another device.
    """
    words = set(name.replace("-", " ").replace("_", " ").lower().split())
    matches = [device for device in DEVICES if words.issuperset(device.name.lower().split())]
    if not matches:
        return None
    device = max(matches, key=lambda device: len(device.name))
    others = words - set(device.name.lower().split())
    return device if all(_NOISE.fullmatch(word) for word in others) else None


def peak_flops(name: str, *, float8: bool = False) -> float | None:
    """Dense bf16 (or float8) peak in FLOP/s of the device that calls itself `name`, or None if it is unknown."""
    device = find_device(name)
    return None if device is None else device.peak_flops(float8=float8)
