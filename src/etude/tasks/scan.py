"""Looks for code in an answer that has no business in an edit of a library.

An in-process recorder can be beaten by code that runs beside it, so such code is looked for in
the syntax tree before anything runs. What the pristine file already uses is allowed: the
reference is never flagged. Names are resolved through the file's own imports; names made at run
time (`getattr` with a computed string, `eval`) are themselves a finding.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import lru_cache


def words(text: str) -> frozenset[str]:
    """A set of names."""
    return frozenset(text.split())


MODULES = words(
    "_ctypes _pytest _thread _xxsubinterpreters asyncio atexit bdb builtins cffi code codeop "
    "conftest coverage ctypes doctest faulthandler fcntl gc http imp importlib marshal mmap "
    "multiprocessing pdb pickle pkgutil pluggy posix pty pytest requests resource runpy select "
    "selectors shutil signal site sitecustomize socket socketserver sqlite3 ssl subprocess "
    "sysconfig tempfile threading trace tracemalloc unittest urllib usercustomize zipimport"
)
"""Modules whose import is a finding."""
WHOLE = frozenset(("os", "sys", "inspect", "traceback", "types", "io", "concurrent"))
"""Modules of which only some names are harmless."""
HARMLESS = {
    "os": words(
        "path PathLike fspath fsencode fsdecode sep linesep curdir pardir extsep altsep pathsep "
        "name devnull strerror cpu_count urandom"
    ),
    "sys": words(
        "version version_info maxsize byteorder getsizeof getrecursionlimit float_info int_info "
        "hash_info platform implementation intern maxunicode getdefaultencoding exc_info "
        "getfilesystemencoding hexversion"
    ),
    "inspect": words(
        "signature Signature Parameter BoundArguments getdoc cleandoc isfunction ismethod isclass "
        "isbuiltin isroutine ismodule isgenerator isgeneratorfunction iscoroutine isabstract "
        "iscoroutinefunction isawaitable isasyncgen isasyncgenfunction getmro unwrap "
        "getfullargspec isdatadescriptor ismethoddescriptor get_annotations"
    ),
    "traceback": words("format_exc format_exception format_exception_only format_tb"),
    "types": words(
        "MethodType FunctionType BuiltinFunctionType GeneratorType ModuleType MappingProxyType "
        "SimpleNamespace LambdaType DynamicClassAttribute NoneType EllipsisType UnionType "
        "GenericAlias CoroutineType AsyncGeneratorType BuiltinMethodType MethodWrapperType "
        "WrapperDescriptorType TracebackType coroutine new_class resolve_bases"
    ),
    "io": words("StringIO BytesIO TextIOWrapper BufferedReader SEEK_SET SEEK_END"),
    "concurrent": frozenset[str](),
}
BUILTINS = words(
    "__builtins__ __import__ __loader__ __spec__ breakpoint compile eval exec exit globals input "
    "open quit SystemExit KeyboardInterrupt GeneratorExit"
)
"""Plain names that are a finding."""
ATTRIBUTES = words(
    "__globals__ __builtins__ __subclasses__ __code__ __closure__ __loader__ __spec__ f_back "
    "f_globals f_locals f_builtins f_code gi_frame cr_frame ag_frame tb_frame tb_next _getframe "
    "_exit _current_frames settrace setprofile excepthook unraisablehook meta_path path_hooks "
    "__setattr__ __delattr__ __getattribute__ __import__ shouldstop nodeid excinfo"
)
"""Attributes that are a finding on anything."""
METHODS = frozenset(
    ("__eq__", "__ne__", "__instancecheck__", "__subclasscheck__", "__class__", "__bool__")
)
"""Definitions by which a value can pretend to be what a test expects."""
DYNAMIC = frozenset(("getattr", "setattr", "delattr", "hasattr", "attrgetter", "methodcaller"))
"""Functions that take the name of an attribute as text."""


def scan(path: str, text: str, pristine: str | None) -> tuple[str, ...]:
    """Findings of `text` that are not findings of `pristine` (None: a new file), as sentences.

    A file that does not parse has none: it fails by itself.
    """
    if not path.endswith(".py"):
        return ()
    mine = findings(text)
    allowed = findings(pristine) if pristine is not None else {}
    return tuple(f"{path}:{line}: {what}" for what, line in mine.items() if what not in allowed)


@lru_cache(maxsize=256)
def findings(text: str) -> Mapping[str, int]:
    """What in a source text can reach out of a library, with the first line of each."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    names = imported(tree)
    found: dict[str, int] = {}
    for node in ast.walk(tree):
        for what in _findings(node, names):
            found.setdefault(what, getattr(node, "lineno", 0))
    return found


def imported(tree: ast.AST) -> dict[str, str]:
    """Local name to dotted origin, for every import of the file; assignments of a module to
    another name are followed too."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.NamedExpr) and isinstance(node.value, ast.Name):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            origin = names.get(node.value.id)
            for target in targets:
                if origin in WHOLE and isinstance(target, ast.Name):
                    names.setdefault(target.id, origin)
    return names


def _findings(node: ast.AST, names: Mapping[str, str]) -> Iterator[str]:
    match node:
        case ast.Import() | ast.ImportFrom():
            yield from _imports(node)
        case ast.Name():
            if node.id in BUILTINS:
                yield f"uses {node.id}"
            if isinstance(node.ctx, ast.Store | ast.Del) and names.get(node.id) in WHOLE:
                yield f"rebinds {node.id}"
        case ast.Attribute():
            yield from _attribute(node, names)
        case ast.Call():
            yield from _call(node, names)
        case ast.FunctionDef() | ast.AsyncFunctionDef() if node.name in METHODS | BUILTINS:
            yield f"defines {node.name}"
        case ast.Subscript() if _is_module(node.value, names):
            yield "looks into a module by subscript"
        case ast.Constant(value=str() as text) if text.startswith(("/proc/", "/dev/fd")):
            yield "names a path of the system"
        case _:
            return


def _imports(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    for alias in node.names:
        if isinstance(node, ast.Import):
            yield from _import(alias.name)
        elif node.module and not node.level:
            yield from _import(node.module, alias.name)


def _import(module: str, name: str = "") -> Iterator[str]:
    first = module.partition(".")[0]
    if first in MODULES:
        yield f"imports {first}"
    elif first in WHOLE and name and module == first and name not in HARMLESS[first]:
        yield f"uses {first}.{name}"
    elif first == "concurrent":
        yield "imports concurrent"


def _attribute(node: ast.Attribute, names: Mapping[str, str]) -> Iterator[str]:
    if node.attr in ATTRIBUTES:
        yield f"uses .{node.attr}"
    if isinstance(node.value, ast.Name):
        origin = names.get(node.value.id, "")
        if origin in WHOLE and node.attr not in HARMLESS[origin]:
            yield f"uses {origin}.{node.attr}"
    if node.attr in MODULES | {"sys", "os"} and _is_module_like(node.value, names):
        # `collections._sys`-like roads lead through a module that another module imported.
        yield f"reaches {node.attr} through another module"
    if node.attr in ("_sys", "_os", "_io", "_thread", "__dict__") and _is_module_like(
        node.value, names
    ):
        yield f"reaches {node.attr} through another module"
    if isinstance(node.ctx, ast.Store | ast.Del) and _is_module_like(node.value, names):
        yield f"changes the module {ast.unparse(node.value)}"


def _call(node: ast.Call, names: Mapping[str, str]) -> Iterator[str]:
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in ("vars", "dir", "locals") and (node.args or name == "locals"):
        if any(_is_module_like(argument, names) for argument in node.args):
            yield f"looks into a module by {name}"
        return
    if name not in DYNAMIC:
        return
    index = 0 if name in ("attrgetter", "methodcaller") else 1
    for argument in node.args[index : index + 1]:
        if isinstance(argument, ast.Constant):
            words = str(argument.value).split(".")
            for word in words:
                if word in ATTRIBUTES | MODULES:
                    yield f"uses .{word}"
        elif not isinstance(argument, ast.Name | ast.Attribute):
            yield f"calls {name} with a computed name"
    if index and node.args and _is_module_like(node.args[0], names):
        yield f"calls {name} on a module"


def _is_module(node: ast.AST, names: Mapping[str, str]) -> bool:
    return isinstance(node, ast.Name) and names.get(node.id) in WHOLE


def _is_module_like(node: ast.AST, names: Mapping[str, str]) -> bool:
    """Whether an expression is a name that an `import` statement bound."""
    return (
        isinstance(node, ast.Name)
        and names.get(node.id, "").split(".")[0] != ""
        and ("." not in names[node.id])
    )
