"""The stores that text is read from and token files are written to, by the scheme of a URL.

A URL stands for one object, for all objects below a folder (a prefix), or for those that match a
pattern; they come in the order in which local files would. Objects and folders whose names begin
with a dot are left out, as among files.
"""

from __future__ import annotations

from collections.abc import Mapping

from gristmill.base.errors import DataError, UserError
from gristmill.hub.buckets import GoogleStore, S3Store
from gristmill.hub.hub_files import HubStore
from gristmill.hub.objects import (
    NothingThereError,
    RemoteObject,
    Store,
    WritableStore,
    missing,
    scheme_of,
    shown,
)
from gristmill.hub.retry import with_retries
from gristmill.hub.web import WebStore

STORES: Mapping[str, Store] = {
    "https": WebStore(),
    "http": WebStore(),
    "s3": S3Store(),
    "gs": GoogleStore(),
    "hf": HubStore(),
}
WRITABLE: Mapping[str, WritableStore] = {"s3": S3Store(), "gs": GoogleStore()}


def store_of(url: str) -> Store:
    """The store of a URL."""
    scheme = scheme_of(url)
    if scheme is None or scheme not in STORES:
        known = ", ".join(f"{name}://" for name in STORES)
        what = f"addresses of the kind {scheme}:// are not known"
        raise UserError(what, where=shown(url), remedy=f"known are {known}")
    return STORES[scheme]


def writable_store_of(url: str) -> WritableStore:
    """The store of a URL that files are to be written to."""
    scheme = scheme_of(url)
    if scheme is None or scheme not in WRITABLE:
        known = " and ".join(f"{name}://" for name in WRITABLE)
        raise UserError(
            f"token files cannot be written to {scheme}://",
            where=shown(url),
            remedy=f"give the name of a local set, or one that begins with {known}",
        )
    return WRITABLE[scheme]


def look_for(url: str) -> RemoteObject | None:
    """The one object at a URL, if it is there."""
    try:
        found = with_retries(lambda: store_of(url).find(url), shown(url))
    except NothingThereError:
        return None
    return next((item for item in found if item.name == shown(url)), None)


def find_objects(url: str) -> list[RemoteObject]:
    """The objects that a URL stands for, sorted; that there are none is an error."""
    name, store = shown(url), store_of(url)
    found = with_retries(lambda: store.find(url), name)
    if not found:
        if any(sign in name for sign in "*?["):
            raise DataError("no object matches", where=name, remedy="check the pattern")
        raise missing(name)
    return sorted(found, key=lambda item: item.name.split("/"))
