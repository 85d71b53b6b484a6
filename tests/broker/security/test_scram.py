"""Goal: the SCRAM server agrees with the RFC and with a client that shares no code with it.

Method: the exchange of RFC 7677, byte by byte; kafka-python's client; and messages that are changed
in every way, which must be refused, never accepted, and never end in another error.
"""

from __future__ import annotations

import base64
import hashlib
import random
import re

import pytest
from kafka.net.sasl.scram import ScramClient

from logmirror.broker.security.scram import (
    Credential,
    Exchange,
    Mechanism,
    RefusedLoginError,
    credential,
    from_salted,
    new_salt,
    read_first,
)

PASSWORD = "pencil, = \N{SNOWMAN}"


def test_the_exchange_of_rfc_7677():
    salt = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
    known = credential(Mechanism.SHA_256, b"pencil", salt=salt)
    first = read_first(b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO")

    exchange = Exchange(first, known, nonce="%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0")

    nonce = b"rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    assert exchange.challenge == b"r=" + nonce + b",s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    proof = b"dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    final = exchange.finish(b"c=biws,r=" + nonce + b",p=" + proof)
    assert final == b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def _client(mechanism: Mechanism, password: str = PASSWORD, user: str = "alice") -> ScramClient:
    return ScramClient(user, password, mechanism.sasl_name)


@pytest.mark.parametrize("mechanism", Mechanism)
@pytest.mark.parametrize("user", ["alice", "a,b=c", "M\N{LATIN SMALL LETTER U WITH DIAERESIS}ller"])
def test_another_client_logs_in_and_the_server_proves_itself(mechanism, user):
    client = _client(mechanism, user=user.replace("=", "=3D").replace(",", "=2C"))
    known = credential(mechanism, PASSWORD.encode(), salt=new_salt(), iterations=8192)

    first = read_first(client.first_message())
    exchange = Exchange(first, known)
    client.process_server_first_message(exchange.challenge)
    final = exchange.finish(client.final_message())

    assert first.user == user
    client.process_server_final_message(final)  # raises if the signature is wrong


def _finished(known: Credential, password: str) -> tuple[Exchange, bytes]:
    client = _client(known.mechanism, password)
    exchange = Exchange(read_first(client.first_message()), known)
    client.process_server_first_message(exchange.challenge)
    return exchange, client.final_message()


@pytest.mark.parametrize("mechanism", Mechanism)
def test_no_other_password_and_no_changed_message_is_accepted(mechanism):
    known = credential(mechanism, PASSWORD.encode(), salt=new_salt())
    exchange, final = _finished(known, PASSWORD + "x")
    with pytest.raises(RefusedLoginError, match="wrong password"):
        exchange.finish(final)

    chance = random.Random(3)
    exchange, final = _finished(known, PASSWORD)
    for _ in range(2000):
        changed = bytearray(final)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(changed))
            changed[at : at + chance.randint(0, 2)] = chance.randbytes(chance.randint(0, 2))
        if _meaning(bytes(changed)) != _meaning(final):
            with pytest.raises(RefusedLoginError):
                exchange.finish(bytes(changed))
    assert exchange.finish(final).startswith(b"v=")


def _meaning(message: bytes) -> tuple[bytes, bytes]:
    """What is signed, and the proof: base64 has several spellings of one value."""
    start, _, proof = message.rpartition(b",p=")
    try:
        return start, base64.b64decode(proof, validate=True)
    except ValueError:
        return message, b""


def test_a_proof_of_any_other_length_is_refused():
    known = credential(Mechanism.SHA_256, PASSWORD.encode(), salt=new_salt())
    exchange, final = _finished(known, PASSWORD)
    start, _, proof = final.rpartition(b",p=")
    right = base64.b64decode(proof)
    for wrong in (b"", right[:-1], right + b"\0", right + right):
        with pytest.raises(RefusedLoginError):
            exchange.finish(start + b",p=" + base64.b64encode(wrong))


FIRST_MESSAGES = {
    "channel binding": b"p=tls-unique,,n=alice,r=abc",
    "delegation token": b"n,,n=alice,r=abc,tokenauth=true",
    "mandatory extension": b"n,,m=x,n=alice,r=abc",
    "another authorization ID": b"n,a=bob,n=alice,r=abc",
    "no user": b"n,,n=,r=abc",
    "no nonce": b"n,,n=alice,r=",
    "escape that does not exist": b"n,,n=al=2Dice,r=abc",
    "unfinished escape": b"n,,n=alice=,r=abc",
    "zero byte": b"n,,n=al\0ice,r=abc",
    "not UTF-8": b"n,,n=al\xff\xfeice,r=abc",
    "nonce that is not printable": b"n,,n=alice,r=a\x01c",
    "no header": b"n=alice,r=abc",
    "empty": b"",
    "PLAIN": b"\0alice\0secret",
    "long": b"n,,n=alice,r=abc" + b"," * 10_000,
}


@pytest.mark.parametrize("name", FIRST_MESSAGES)
def test_a_first_message_that_is_not_one_is_refused(name):
    with pytest.raises(RefusedLoginError):
        read_first(FIRST_MESSAGES[name])


def test_first_messages_that_clients_send_are_accepted():
    assert read_first(b"n,a=alice,n=alice,r=abc").gs2_header == "n,a=alice,"
    assert read_first(b"y,,n=alice,r=abc,x=some").bare == "n=alice,r=abc,x=some"
    assert read_first(b"n,,n=a=2Cb=3Dc,r=abc").user == "a,b=c"


def test_random_messages_are_refused_and_nothing_else():
    chance = random.Random(1)
    known = credential(Mechanism.SHA_512, b"x", salt=b"salt")
    alphabet = b"nyrscpia=,=2C=3D\0\xc3\xbc09AZ+/"
    for _ in range(3000):
        token = bytes(chance.choice(alphabet) for _ in range(chance.randint(0, 60)))
        with pytest.raises(RefusedLoginError):
            Exchange(read_first(b"n,,n=alice,r=abc"), known).finish(token)
        try:
            read_first(token)
        except RefusedLoginError:
            continue
        assert re.match(rb"[ny],", token)


def test_a_salted_password_gives_the_same_credential():
    known = credential(Mechanism.SHA_512, b"x", salt=b"salt", iterations=5000)
    salted = hashlib.pbkdf2_hmac("sha512", b"x", b"salt", 5000)

    assert from_salted(Mechanism.SHA_512, salted, salt=b"salt", iterations=5000) == known


def test_a_credential_does_not_print_its_keys():
    known = credential(Mechanism.SHA_256, b"x", salt=b"salt")

    assert repr(known) == "Credential(SCRAM-SHA-256, 4096 iterations)"
