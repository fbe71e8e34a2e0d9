"""Proofs that both ends of a TCP connection know the same token, which never travels.

Each end contributes random bytes, so that no proof can be used twice, and each kind of proof has a
name, so that none can be used for another. This says nothing about who reads along.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from stretto.messages.link import Offer

CHALLENGE_BYTES = 32


def new_challenge() -> bytes:
    """Return random bytes for one connection."""
    return secrets.token_bytes(CHALLENGE_BYTES)


def proof(token: str, purpose: str, *parts: object) -> bytes:
    """Return the proof that its maker knows the token, over a purpose and what both ends have said."""
    said = msgspec.msgpack.encode((purpose, *parts))
    return hmac.digest(token.encode(), said, hashlib.sha256)


def is_proof(given: bytes, token: str, purpose: str, *parts: object) -> bool:
    """Say whether a proof is right; how long that takes tells nothing about it."""
    return hmac.compare_digest(given, proof(token, purpose, *parts))


def parts_of(challenge: bytes, offer: Offer) -> tuple[object, ...]:
    """Return what the proof of an offer covers: both challenges, and all that it says."""
    return (
        challenge,
        offer.challenge,
        offer.protocol,
        offer.stage,
        offer.nonce,
        offer.pid,
        offer.host,
        offer.payload_port,
    )
