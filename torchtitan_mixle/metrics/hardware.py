"""Peak rates by device name. A device that is not here has no MFU: never another device's peak."""

# Dense bf16 tensor-core rates in FLOP/s from the makers' data sheets. Sheets that print the rate with 2:4 sparsity
# are halved.
_PEAK_BF16: dict[str, float] = {
    "A100": 312e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "H20": 148e12,
}


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak in FLOP/s of the device that calls itself `device_name`, or None if it is unknown.

    The longest known name whose words all occur in the device's name wins, so that an "H100 NVL" is not taken for
    an H100 and an "H200" not for an H20. A MIG slice has a share of the peak that its name does not tell: None.
    """
    words = set(device_name.replace("-", " ").replace("_", " ").lower().split())
    if "mig" in words:
        return None
    matches = [name for name in _PEAK_BF16 if words.issuperset(name.lower().split())]
    return _PEAK_BF16[max(matches, key=len)] if matches else None
