"""Loads, verifies, saves and uploads artifacts; they contain only data, and nothing is run or unpickled.

longtrain.json       schema version, method, config, target, sha256 of the tensor files, provenance
model.safetensors    the trained tensors
golden.safetensors   fixed inputs and the outputs that the module must reproduce
FOLDER/...           the module in other tools' formats, if the method has any; never read by longtrain
README.md            model card, never read by longtrain; *.png: its pictures
evidence.json        training curves and evaluation results, shown by the card and by `inspect`
local.json           the target's local folder, if it has one; never uploaded
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from longtrain import methods
from longtrain.artifact.evidence import EVIDENCE, Evidence
from longtrain.artifact.found import HUB, find, imported
from longtrain.artifact.golden import KINDS, Golden, States
from longtrain.artifact.golden.checks import ADVICE, OTHER_STATES, Verification, refuse
from longtrain.artifact.golden.kinds import PERIOD, SCRIPTED
from longtrain.artifact.hub import check_push, upload
from longtrain.artifact.stored import (
    CARD,
    GOLDEN,
    MODEL,
    card_of,
    check_copies,
    check_tensors,
    files_of,
    local_target,
    read_golden,
    read_manifest,
    read_tensors,
    refuse_missing_keys,
    refuse_not_finite,
)
from longtrain.assets import MANIFEST, artifact_kind
from longtrain.errors import ArtifactError, ConfigError, LongtrainError, first_line
from longtrain.files import sealed, write_files
from longtrain.folders import replaced_folder
from longtrain.layers import shapes_alone
from longtrain.log import get_logger
from longtrain.settings import from_file, read
from longtrain.targets.info import TargetInfo, TargetSketch

if TYPE_CHECKING:
    from longtrain.decoding.roles import Parts
    from longtrain.methods.spec import MethodSpec
    from longtrain.targets.model import Target
    from longtrain.targets.step import OutputRequest

log = get_logger(__name__)

NO_GOLDEN = "it has no golden outputs, so nothing shows that it computes what was exported"
READ = (MANIFEST, MODEL, GOLDEN, EVIDENCE)
"""The files of an artifact that are downloaded from the Hub."""
FILES = (*READ, CARD, "*.png")
"""The files that are uploaded; they contain no local paths."""


@dataclass(frozen=True)
class Artifact:
    """A trained module with everything needed to use it on its target and to refuse any other target.

    Args:
        method: a name of the closed table `methods.names()`.
        config: the method's configuration as plain values.
        target: the target it was trained for.
        tensors: the module's state, by name.
        golden: recorded outputs; None only for methods without a part for an engine.
        provenance: the command, versions and data that it was made with.
        folder: the folder it was read from; None: it was not.
        verification: checks made at export and since it was loaded.
        lenient: True records a failed check in `verification` instead of raising an error.
    """

    method: str
    config: dict[str, Any]
    target: TargetInfo
    tensors: dict[str, Tensor]
    golden: Golden | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    verification: Verification = field(default_factory=Verification, compare=False)
    lenient: bool = field(default=False, compare=False)

    @classmethod
    def from_module(
        cls,
        method: str,
        config: Any,
        *,
        module: nn.Module,
        target: Target,
        provenance: dict[str, Any] | None = None,
        states: Callable[[OutputRequest, int], States] | None = None,
    ) -> Artifact:
        """Wrap a trained module and record its golden outputs on the target.

        If they cannot be recorded, the reason is added to `verification`, and the module can still be saved.

        Args:
            method: the method's name.
            config: its `Config`.
            module: the trained module.
            target: the target it was trained for.
            provenance: see `Artifact`.
            states: (what a draft asks of the target, length in tokens) -> a document and the target's states
                for it, for a target that cannot run.

        Raises:
            ArtifactError: a weight is NaN or infinite.
        """
        spec = methods.get(method)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
        refuse_not_finite(tensors, f"the trained {method} module")
        values = dataclasses.asdict(config)
        made = cls(method, values, target.info, tensors, provenance=dict(provenance or {}))
        parts = None if spec.attach is None else made._parts(target)
        kind = next((kind for kind in KINDS.values() if getattr(parts, kind.role, None) is not None), None)
        if kind is None:
            return made
        others = [partial(made._parts, **keys) for keys in spec.golden_others(config, target.info)]
        tokens, draft = spec.golden_tokens(config), parts and parts.draft
        try:
            told = states(draft.outputs, max(PERIOD, tokens) + SCRIPTED) if states and draft else None
            golden = Golden.record(kind, made._parts, target, tokens=tokens, others=others, states=told)
        except (LongtrainError, RuntimeError) as error:  # RuntimeError: e.g. torch runs out of memory
            made.verification.faults.append(f"its golden outputs could not be recorded: {first_line(error)}")
            return made
        return dataclasses.replace(made, golden=golden)

    @classmethod
    def load(
        cls,
        where: str | Path,
        *,
        home: str | Path = ".",
        trained_by: str | None = None,
        unverified: bool = False,
    ) -> Artifact:
        """Read and check an artifact: schema, method, checksums, names and shapes of every tensor.

        Args:
            where: a folder, a name under `home/checkpoints`, the name of a bundled artifact (`tiny_longspec`,
                `tiny_lookaheadkv`), a Hub id (ORG/NAME, or hub:ORG/NAME, either with @REVISION), or a folder
                in another tool's format that a method reads.
            home: the folder that holds `checkpoints`.
            trained_by: the trainer that wrote another tool's folder, if its meaning depends on it.
            unverified: accept an artifact without golden outputs, so that nothing checks that it behaves as
                exported. Folders of other tools have none.

        Raises:
            ArtifactError: the artifact is missing, damaged or of another format.
        """
        folder = find(where, Path(home), patterns=READ)
        if not (folder / MANIFEST).is_file():
            name, found = imported(folder, trained_by)
            refuse_not_finite(found.tensors, str(folder))
            return cls(name, found.config, found.target, found.tensors, None, found.about, folder)
        manifest = read_manifest(folder / MANIFEST)
        method = manifest["method"]
        if method not in methods.names():
            raise ArtifactError(
                f"{folder / MANIFEST} names the method '{method}'; known: {', '.join(methods.names())}; "
                "a newer longtrain may know it"
            )
        try:
            info = TargetInfo.from_json(manifest["target"])
        except (TypeError, AttributeError) as error:
            raise ArtifactError(
                f"{folder / MANIFEST} describes its target wrongly: {error}; export it again"
            ) from None
        info = dataclasses.replace(info, name=local_target(folder) or info.name)
        tensors = read_tensors(folder / MODEL, manifest["files"])
        refuse_not_finite(tensors, str(folder / MODEL))
        golden = read_golden(folder, manifest)
        verification = _verification(manifest, golden)
        if verification.faults and not unverified:
            raise ArtifactError(
                f"{folder} is not verified: {verification.faults[0]}; look closer: longtrain inspect "
                f"{folder}; {ADVICE}"
            )
        check_copies(folder, manifest["files"])
        artifact = cls(
            method,
            manifest["config"],
            info,
            tensors,
            golden,
            manifest["provenance"],
            folder,
            verification,
            unverified,
        )
        refuse_missing_keys(artifact.config, methods.config_class(method), folder)
        check_tensors(artifact._empty_module(info), tensors, folder / MODEL)
        return artifact

    @property
    def verified(self) -> bool:
        """True if no check has failed, at export or since."""
        return not self.verification.faults

    def typed_config(self) -> Any:
        """Return the method's `Config` with this artifact's values.

        Raises:
            ArtifactError: the method does not accept a value.
        """
        try:
            return read(methods.config_class(self.method), methods.without_gone(self.config), "method")
        except ConfigError as error:
            raise ArtifactError(
                f"artifact's configuration is wrong for method {self.method}: {error}; a newer longtrain may "
                "know it"
            ) from None

    def build(self, target: Target, *, verify: bool = True) -> nn.Module:
        """Return the module on the target's device and in its dtype, after all checks.

        Args:
            target: the frozen target that the module will run with.
            verify: compare with the golden outputs (one short prompt through the target).

        Raises:
            TargetMismatchError: the module was trained for another target.
            ArtifactError: the golden outputs are not reproduced, and the artifact is not `lenient`.
        """
        self.target.check(target.info)
        if verify and self.golden is not None:
            self._verify(self.golden, target)
        return self._module(target)

    def attach(self, target: Target, *, verify: bool = True, **keys: Any) -> Parts:
        """Return the parts to pass to an engine.

        Args:
            target: the frozen target that the module will run with.
            verify: see `build`.
            keys: inference keys of the method.

        Raises:
            TargetMismatchError: the module was trained for another target.
            ArtifactError: see `build`; or the method has no part for an engine.
        """
        module = self.build(target, verify=verify)
        return _attach(methods.get(self.method), module, target, self.typed_config(), keys)

    def save(self, folder: str | Path) -> Path:
        """Write the folder atomically; an older artifact of the same path is replaced.

        Args:
            folder: the folder to write; `describe` adds pictures and results to its card.

        Raises:
            LongtrainError: the folder holds something other than an artifact, or the disk is full or not
                writable.
        """
        folder = Path(folder)
        files = files_of(self, folder.name)
        with replaced_folder(folder, artifact_kind(folder, files)) as fresh:
            write_files(fresh, files)
        return folder

    def describe(
        self,
        evidence: Evidence | None = None,
        *,
        pictures: dict[str, bytes] | None = None,
        licence: str | None = None,
        address: str | None = None,
    ) -> None:
        """Write the folder's card again; arguments that are not given keep their current content.

        Comparisons made since the artifact was loaded are not on the card: they are about one machine.

        Args:
            evidence: training curves and evaluation results.
            pictures: PNG files to add, by file name.
            licence: the module's licence, also written into the manifest.
            address: place of the artifact on the Hub, `hub:ORG/NAME`; None: the card's own folder.

        Raises:
            ConfigError: the artifact was not loaded from an artifact folder.
        """
        folder, files = self.folder, dict(pictures or {})
        if folder is None or not (folder / MANIFEST).is_file():
            raise ConfigError("only an artifact on disk can be pushed; save it and load it from there")
        if evidence is not None:
            files[EVIDENCE] = evidence.to_bytes()
        manifest = read_manifest(folder / MANIFEST)
        stored = dataclasses.replace(self, verification=_verification(manifest, self.golden))
        if licence is not None:
            self.provenance["license"] = licence
            manifest["provenance"]["license"] = licence
            files[MANIFEST] = sealed(manifest)
        name = address.rpartition("/")[2] if address else folder.name
        shown = {*(file.name for file in folder.glob("*.png")), *(pictures or {})}
        known = evidence or Evidence.of_folder(folder)
        files[CARD] = card_of(stored, name, self._copies(), shown, known, address=address)
        write_files(folder, files)

    def push(self, repo: str, *, private: bool = True, collection: str | None = None) -> str:
        """Upload the folder this artifact was loaded from; its card then refers to the Hub.

        Args:
            repo: ORG/NAME on the Hub (at `HF_ENDPOINT`, if set).
            private: see `upload`.
            collection: see `upload`.

        Returns:
            The URL of the commit.

        Raises:
            ConfigError: not logged in, offline, or `repo` is not ORG/NAME; or another tool's folder.
            ArtifactError: the Hub refused the upload.
        """
        check_push(repo, collection)
        self.describe(address=HUB + repo)
        assert self.folder is not None
        patterns = [*FILES, *self._copies()]
        return upload(self.folder, repo, patterns=patterns, private=private, collection=collection)

    def parameters(self) -> int:
        """Number of elements of all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    def checksum(self) -> str:
        """Hex sha256 of the weights file (the first one of several)."""
        assert self.folder is not None
        files = [self.folder / MODEL, *sorted(self.folder.glob("model-*")), *self.folder.glob("*.bin")]
        first = next(file for file in files if file.is_file())
        with first.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    def _verify(self, golden: Golden, target: Target) -> None:
        """Compare with the golden outputs; a failure is raised, or recorded if the artifact is lenient."""
        checks, faults = self.verification.checks, self.verification.faults
        try:
            checks[:] = golden.measure(self._parts, target)
            refuse(checks)
        except ArtifactError as error:
            reason = f"{error}{OTHER_STATES if self.provenance.get('states') == 'engine' else ''}"
            if not self.lenient:
                raise ArtifactError(f"{reason}; {ADVICE}") from error
            if reason not in faults:
                faults.append(reason)
                log.warning("unverified=%s reason=%s", self.folder or self.method, reason)

    def _copies(self) -> list[str]:
        """Return the files in the folder that are in other tools' formats."""
        assert self.folder is not None
        return [name for name in read_manifest(self.folder / MANIFEST)["files"] if "/" in name]

    def _module(self, view: Any) -> nn.Module:
        """Return the module in the dtype and on the device of a target or of a view of one."""
        info = view.info if isinstance(self.target, TargetSketch) else self.target
        module = self._empty_module(info).to_empty(device=view.device)
        module.load_state_dict(self.tensors)
        return module.to(dtype=view.dtype).eval().requires_grad_(False)

    def _parts(self, view: Any, **keys: Any) -> Parts:
        spec = methods.get(self.method)
        return _attach(spec, self._module(view), view, self.typed_config(), {**spec.golden_keys, **keys})

    def _empty_module(self, info: TargetInfo) -> nn.Module:
        config = self.typed_config()
        try:
            with shapes_alone():
                return methods.get(self.method).build(config, info)
        except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
            raise ArtifactError(
                f"artifact describes no {self.method} module: {first_line(error)}; export it again"
            ) from None


def _verification(manifest: dict[str, Any], golden: Golden | None) -> Verification:
    """Return the checks that a manifest records, and that golden outputs are missing if they are."""
    found = from_file(Verification, manifest["verification"])
    if golden is None and methods.get(manifest["method"]).attach is not None and not found.faults:
        found.faults.append(NO_GOLDEN)
    return found


def _attach(spec: MethodSpec, module: nn.Module, target: Target, config: Any, keys: dict[str, Any]) -> Parts:
    if spec.attach is None:
        raise ArtifactError(f"method {spec.name} brings nothing to an engine; it cannot be attached")
    return spec.attach(module, target, config, keys)
