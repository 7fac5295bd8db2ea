"""Where runs are kept, in mi-crow's words."""

from interpose.dialects.mi_crow.store.local_store import LocalStore
from interpose.dialects.mi_crow.store.store import Store
from interpose.dialects.mi_crow.store.store_dataloader import StoreDataloader

__all__ = ["LocalStore", "Store", "StoreDataloader"]
