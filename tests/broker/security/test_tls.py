"""Goal: the principal of a certificate is the one that Apache Kafka derives.

Method: certificates made by another library; the expected names are those of Java's
`X500Principal.getName()`.
"""

from __future__ import annotations

import datetime as dt

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from logmirror.broker.security.tls import subject_name

OID = {
    "CN": NameOID.COMMON_NAME,
    "OU": NameOID.ORGANIZATIONAL_UNIT_NAME,
    "O": NameOID.ORGANIZATION_NAME,
    "C": NameOID.COUNTRY_NAME,
    "L": NameOID.LOCALITY_NAME,
    "ST": NameOID.STATE_OR_PROVINCE_NAME,
    "STREET": NameOID.STREET_ADDRESS,
    "DC": NameOID.DOMAIN_COMPONENT,
    "UID": NameOID.USER_ID,
    "EMAIL": NameOID.EMAIL_ADDRESS,
    "SERIAL": NameOID.SERIAL_NUMBER,
}


def _certificate(*relative: list[tuple[str, str]]) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name(
        x509.RelativeDistinguishedName([x509.NameAttribute(OID[kind], text) for kind, text in each])
        for each in relative
    )
    now = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    issuer = x509.Name([x509.NameAttribute(OID["CN"], "issuer")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(2**150 + 1)
        .not_valid_before(now)
        .not_valid_after(now + dt.timedelta(days=9))
        .sign(key, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.DER)


@pytest.mark.parametrize(
    ("relative", "expected"),
    [
        (
            [[("C", "DE")], [("O", "Example")], [("OU", "Data")], [("CN", "alice")]],
            "CN=alice,OU=Data,O=Example,C=DE",
        ),
        ([[("DC", "org")], [("DC", "example")], [("UID", "al")]], "UID=al,DC=example,DC=org"),
        (
            [[("ST", "Bavaria")], [("L", "M\N{LATIN SMALL LETTER U WITH DIAERESIS}nchen")]],
            "L=M\N{LATIN SMALL LETTER U WITH DIAERESIS}nchen,ST=Bavaria",
        ),
        (
            [[("CN", 'a,b+c"d\\e<f>g;h')]],
            'CN=a\\,b\\+c\\"d\\\\e\\<f\\>g\\;h',
        ),
        ([[("CN", "#alice")]], "CN=\\#alice"),
        ([[("CN", " alice ")]], "CN=\\ alice\\ "),
        (
            [[("EMAIL", "a@example.org")], [("CN", "alice")]],
            "CN=alice,1.2.840.113549.1.9.1=#160d61406578616d706c652e6f7267",
        ),
        ([[("SERIAL", "7")], [("CN", "alice")]], "CN=alice,2.5.4.5=#130137"),
        ([[("STREET", "Main 1")]], "STREET=Main 1"),
        ([[("CN", "alice"), ("OU", "Data")]], "OU=Data+CN=alice"),
        ([[("CN", "a  ")]], "CN=a\\ \\ "),
        ([[("CN", "  ")]], "CN=\\ \\ "),
        ([[("CN", " #a")]], "CN=\\ \\#a"),
        ([[("CN", "a#=\nb")]], "CN=a\\#\\=\\\nb"),
        ([[("CN", "a\0b")]], "CN=a\\00b"),
        ([], ""),
    ],
    ids=range(16),
)
def test_a_subject_in_the_form_of_rfc_2253(relative, expected):
    assert subject_name(_certificate(*relative)) == expected


def test_bytes_that_are_no_certificate_are_an_error_and_no_crash():
    whole = _certificate([("CN", "alice")])
    for size in range(len(whole) // 2):
        with pytest.raises(ValueError):  # noqa: PT011  # the kind is what matters
            subject_name(whole[:size])
