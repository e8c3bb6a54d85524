"""Text -> strings inside LLVM IR."""

from __future__ import annotations


def escape(text: str) -> str:
    """Escape `text` for a string in quotation marks of LLVM IR."""
    return "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:02X}"
        for byte in text.encode()
    )
