"""The coordinator's TLS certificate: self-signed, stored in the run's folder, pinned by the fingerprint in the invite.

It is ECDSA over P-256, since gRPC's BoringSSL does not offer Ed25519 by default. No authority vouches for it: a client
accepts it because its SHA-256 is the one in the invite.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from coordinator import durable
from coordinator.errors import CertificateFileError
from protocol.errors import os_reason
from protocol.ids import Digest, sha256
from protocol.invite import TLS_NAME

FILE = "tls.pem"
YEARS = 10


@dataclass(frozen=True)
class TlsCertificate:
    """A private key and its certificate, as PEM."""

    key_pem: bytes
    certificate_pem: bytes
    fingerprint: Digest


def load_or_make(folder: Path, *, now: datetime.datetime | None = None) -> TlsCertificate:
    """Return the certificate in the folder; it is made if there is none. Raises CertificateFileError."""
    path = folder / FILE
    now = now or datetime.datetime.now(datetime.timezone.utc)
    try:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = _make(now)
            durable.replace(path, data, 0o600)
        else:
            if path.stat().st_mode & 0o077:
                os.chmod(path, 0o600)
    except OSError as e:
        raise CertificateFileError(
            f"{path}: {os_reason(e)}: check that the folder exists and is writable by you"
        ) from None
    return _read(path, data, now)


def _make(now: datetime.datetime) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, TLS_NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # A day early, for clients whose clocks are behind.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(TLS_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + certificate.public_bytes(serialization.Encoding.PEM)


def _read(path: Path, data: bytes, now: datetime.datetime) -> TlsCertificate:
    try:
        key = serialization.load_pem_private_key(data, password=None)
        certificate = x509.load_pem_x509_certificate(data)
    except ValueError:
        raise CertificateFileError(
            f"{path} is damaged: restore it from a copy, or move it away for a new one (old invites stop working)"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise CertificateFileError(f"{path}: the key is not that of the certificate: restore the file from a copy")
    if certificate.not_valid_before_utc > now:
        raise CertificateFileError(
            f"{path}: the certificate begins on {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC, and clients "
            "refuse it until then: set this machine's clock, or move the file away for a new one, and publish the new "
            "invite"
        )
    if certificate.not_valid_after_utc <= now:
        raise CertificateFileError(
            f"{path}: the certificate ended on {certificate.not_valid_after_utc:%Y-%m-%d}: move the file away for a "
            "new one, and publish the new invite"
        )
    der = certificate.public_bytes(serialization.Encoding.DER)
    return TlsCertificate(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        certificate.public_bytes(serialization.Encoding.PEM),
        Digest(sha256(der)),
    )
