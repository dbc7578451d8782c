"""The files of a session: the tier that has them, and which of them stay when it ends."""

from __future__ import annotations

from contextlib import ExitStack
from typing import final

from forebay.arenas import DISK_BLOCK, DISK_BOUNCE, Arenas
from forebay.errors import ConfigError
from forebay.memory import Kind, Ledger
from forebay.plans import Plan
from forebay.tiers.diskfile import DiskPolicy, TierFile
from forebay.tiers.kept import KeptFolder
from forebay.tiers.stripes import DiskTier, Folder

__all__ = ["Filing"]


@final
class Filing:
    """The files of ``plan``, whose arenas are ``sizes``, by name: none where nothing is on disk. ``stack`` closes them.

    Parameters and states are in ``kept``, if there is one.
    """

    def __init__(
        self, plan: Plan, sizes: Arenas, stack: ExitStack, ledger: Ledger, host: Ledger, kept: KeptFolder | None
    ) -> None:
        self.files: dict[str, TierFile] = {}
        self.tier: DiskTier | None = None
        self._kept = kept
        if not sizes.disk:
            return
        if plan.budget.disk is None:
            raise ConfigError("the plan puts something on disk and its budget names no disk; give disk=PATH:SIZE")
        if kept is not None:
            # Behind the tier: a file is closed before its name goes.
            stack.callback(kept.close)
        # So much need not be free now: it is, when the other places are written.
        returning = 0 if kept is None else min(kept.before, sizes.disk_other_parameters + sizes.disk_other_states)
        tier = self.tier = stack.enter_context(
            DiskTier(
                [Folder(share.path, share.nbytes) for share in plan.budget.disk.folders],
                ledger=ledger,
                needed=sizes.disk - returning,
                host_ledger=host,
                policy=DiskPolicy(
                    reads=plan.streaming.disk_reads,
                    writes=plan.streaming.disk_writes,
                    bounce_buffers=DISK_BOUNCE,
                    bounce_block=DISK_BLOCK,
                    verified=plan.streaming.checksums,
                ),
            )
        )
        if sizes.disk_parameters:
            others = sizes.disk_other_parameters
            self.files["parameters"] = self._home(tier, "parameters", sizes.disk_parameters, others, Kind.PARAMETER)
        if sizes.disk_states:
            others = sizes.disk_other_states
            self.files["states"] = self._home(tier, "states", sizes.disk_states, others, Kind.STATE)
        if sizes.disk_activations:
            self.files["activations"] = tier.create("activations", sizes.disk_activations, Kind.ACTIVATION)

    @property
    def written(self) -> int:
        """Bytes written to the files so far."""
        return 0 if self.tier is None else self.tier.written

    def _home(self, tier: DiskTier, name: str, nbytes: int, others: int, kind: Kind) -> TierFile:
        if self._kept is None:
            return tier.create(name, nbytes, kind)
        made = tier.create(name, nbytes, kind, self._kept.path_of(name), self._kept.at_first(nbytes, others))
        return self._kept.hold(name, made)
