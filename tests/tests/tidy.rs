//! Rules of the tree that the compiler does not know: which crate may use which, where `unsafe` may stand, how long a
//! file may grow, what no file may contain.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What each crate of the project may use of the project. Frontends, datapath and replica meet only in `libs/`;
/// control knows no block I/O; only the programs, tests and benches put things together. Development dependencies
/// count, too.
const EDGES: &[(&str, &[&str])] = &[
    ("lh-block", &[]),
    ("lh-wire", &["lh-block"]),
    ("lh-ring", &["lh-block", "lh-rig"]),
    ("lh-rig", &["lh-block", "lh-ring"]),
    ("ublk-frontend", &["lh-block", "lh-ring", "lh-rig"]),
    ("nbd-frontend", &["lh-block", "lh-ring", "lh-rig"]),
    ("iscsi-frontend", &["lh-block", "lh-ring", "lh-rig"]),
    ("fuse-frontend", &["lh-block", "lh-ring", "lh-rig"]),
    ("datapath", &["lh-block", "lh-wire", "lh-ring", "lh-rig"]),
    ("replica", &["lh-block", "lh-wire", "lh-ring", "lh-rig"]),
    ("backupstore", &["lh-block"]),
    ("control", &["lh-block"]),
    ("lh-cluster", &["control", "lh-block"]),
    ("csi", &["control", "lh-cluster"]),
];

/// Crates that may use all others.
const COMPOSITION: &[&str] = &["longhorn", "tests", "benches"];

/// Folders in which `unsafe` may stand.
const UNSAFE_ROOMS: &[&str] = &["libs/ring/", "libs/rig/", "ublk-frontend/src/kernel"];

/// Lines of production code in one file. A file that has a reason to be longer is listed with it below.
const FILE_LINES: usize = 640;
const LONG_FILES: &[(&str, &str)] = &[];

/// Lines of one function.
const FUNCTION_LINES: usize = 80;
const LONG_FUNCTIONS: &[(&str, &str)] = &[];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the workspace").to_owned()
}

/// Files that git tracks or would track, so that build products are never looked at.
fn files(ending: &str) -> Vec<(String, String)> {
    let out = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .expect("git lists the files");
    assert!(out.status.success(), "git ls-files failed");
    let names = String::from_utf8(out.stdout).expect("names are UTF-8");
    let found: Vec<_> = names
        .lines()
        .filter(|n| n.ends_with(ending))
        .filter_map(|n| Some((n.to_owned(), fs::read_to_string(root().join(n)).ok()?)))
        .collect();
    assert!(!found.is_empty(), "no file ends in {ending}: the rules would hold of nothing");
    found
}

/// Source with comments and string contents taken out, line by line.
fn code_lines(source: &str) -> impl Iterator<Item = (usize, String)> + '_ {
    source.lines().enumerate().map(|(i, line)| {
        let mut code = String::new();
        let mut in_string = false;
        let mut chars = line.chars().peekable();
        while let Some(c) = chars.next() {
            match c {
                '\\' if in_string => drop(chars.next()),
                '"' => in_string = !in_string,
                '/' if !in_string && chars.peek() == Some(&'/') => break,
                c if !in_string => code.push(c),
                _ => {}
            }
        }
        (i + 1, code)
    })
}

fn is_test_file(name: &str) -> bool {
    name.contains("/tests/")
        || name.starts_with("tests/")
        || name.starts_with("benches/")
        || name.contains("/benches/")
        || name.contains("/examples/")
        || name.ends_with("/tests.rs")
        || name.ends_with("_test.rs")
}

#[test]
fn dependencies_point_one_way() {
    let out = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(root())
        .output()
        .expect("cargo metadata runs");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let meta: serde_json::Value = serde_json::from_slice(&out.stdout).expect("cargo writes JSON");
    let packages = meta["packages"].as_array().expect("packages");
    let names: Vec<&str> = packages.iter().filter_map(|p| p["name"].as_str()).collect();
    let allowed: BTreeMap<_, _> = EDGES.iter().copied().collect();
    let mut wrong = Vec::new();
    for package in packages {
        let name = package["name"].as_str().expect("name");
        if COMPOSITION.contains(&name) {
            continue;
        }
        let Some(may) = allowed.get(name) else {
            wrong.push(format!("{name} is not listed in EDGES"));
            continue;
        };
        for dep in package["dependencies"].as_array().expect("dependencies") {
            let dep = dep["name"].as_str().expect("name");
            if names.contains(&dep) && !may.contains(&dep) && dep != name {
                wrong.push(format!("{name} uses {dep}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn unsafe_stands_in_its_rooms() {
    let mut wrong = Vec::new();
    for (name, source) in files(".rs") {
        if UNSAFE_ROOMS.iter().any(|room| name.starts_with(room)) || is_test_file(&name) {
            continue;
        }
        for (line, code) in code_lines(&source) {
            if code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe") {
                wrong.push(format!("{name}:{line}"));
            }
        }
    }
    assert!(wrong.is_empty(), "unsafe outside its rooms: {wrong:#?}");
}

#[test]
fn files_and_functions_do_not_grow_past_the_line() {
    let mut wrong = Vec::new();
    for (name, source) in files(".rs") {
        if is_test_file(&name) {
            continue;
        }
        let production = production_lines(&source);
        if production > FILE_LINES && !LONG_FILES.iter().any(|(n, _)| *n == name) {
            wrong.push(format!("{name}: {production} lines, the line is {FILE_LINES}"));
        }
        for (function, lines) in functions(&source) {
            let known = LONG_FUNCTIONS.iter().any(|(n, _)| *n == format!("{name}: {function}"));
            if lines > FUNCTION_LINES && !known {
                wrong.push(format!("{name}: {function} has {lines} lines, the line is {FUNCTION_LINES}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Lines before a file's tests. Other things that only tests have, and modules of theirs in other files, stand anywhere and are short.
fn production_lines(source: &str) -> usize {
    let lines: Vec<&str> = source.lines().collect();
    let begins = |line: &str| {
        line.ends_with('{')
            && line
                .split_once("mod ")
                .is_some_and(|(before, _)| before.is_empty() || before.starts_with("pub"))
    };
    let tests = lines.windows(2).position(|two| matches!(two, ["#[cfg(test)]", next] if begins(next)));
    tests.unwrap_or(lines.len())
}

/// Names and lengths of functions, found by indentation: the sources are formatted.
fn functions(source: &str) -> Vec<(String, usize)> {
    let mut open: Vec<(String, usize, usize)> = Vec::new();
    let mut found = Vec::new();
    for (line, text) in source.lines().enumerate() {
        let indent = text.len() - text.trim_start().len();
        let body = text.trim_start();
        if let Some(at) = body.find("fn ").filter(|at| {
            body[..*at].split_whitespace().all(|w| {
                w.starts_with("pub")
                    || ["const", "async", "unsafe", "extern", "in", "crate)", "super)"].contains(&w)
            })
        }) {
            let name: String =
                body[at + 3..].chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            // A declaration, or a function of one line, ends where it begins.
            if !body.ends_with([';', '}']) {
                open.push((name, indent, line));
            }
        }
        if body == "}"
            && open.last().is_some_and(|(_, i, _)| *i == indent)
            && let Some((name, _, start)) = open.pop()
        {
            found.push((name, line - start + 1));
        }
    }
    found
}

#[test]
fn files_and_functions_are_measured_to_their_ends() {
    let fields = "struct A {\n    #[cfg(test)]\n    b: u8,\n}\n#[cfg(test)]\nmod c;\nfn d() {}\n";
    assert_eq!(production_lines(fields), 7);
    for module in ["mod tests {", "pub(in super::super) mod fault {"] {
        assert_eq!(production_lines(&format!("{fields}#[cfg(test)]\n{module}\n    fn e() {{}}\n}}\n")), 7);
    }
    let outer = "fn outer() {\n    fn inner() {}\n    if true {\n        inner();\n    }\n}\n";
    assert_eq!(functions(outer), [("outer".to_owned(), 6)]);
}

#[test]
fn no_loose_ends() {
    // Spelled apart, so that this file does not trip over itself.
    let banned = [
        "TO\u{44}O",
        "FIX\u{4d}E",
        "XX\u{58}",
        "todo\u{21}(",
        "unimplemented\u{21}(",
        "#[ign\u{6f}re",
        "allow(dead_c\u{6f}de)",
    ];
    let mut wrong = Vec::new();
    for ending in [".rs", ".py", ".toml"] {
        for (name, source) in files(ending) {
            for (line, text) in source.lines().enumerate() {
                if let Some(b) = banned.iter().find(|b| text.contains(**b)) {
                    wrong.push(format!("{name}:{}: {b}", line + 1));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The name of what this line skips, if it skips anything; empty where it has none.
fn skipped(line: &str) -> Option<&str> {
    // Spelled apart, so that this file does not trip over itself.
    let (said, calls) = ("\"SKI\u{50}", ["ski\u{70}(\"", "ski\u{70}(f\""]);
    if let Some((_, rest)) = line.split_once(said) {
        let named = rest.strip_prefix(' ').and_then(|rest| rest.split_once(": "));
        return Some(named.map_or("", |(name, _)| name));
    }
    let (_, rest) = calls.into_iter().find_map(|call| line.split_once(call))?;
    let (name, behind) = rest.split_once('"')?;
    // Where nothing follows it is the reason: some programs skip one thing alone.
    behind.starts_with(',').then_some(name)
}

/// `scripts/test` counts what could not run by these lines, and people look for its name.
#[test]
fn skips_say_what_was_skipped() {
    let mut wrong = Vec::new();
    let mut seen = 0;
    for (name, source) in files("") {
        let program = [".rs", ".py"].iter().any(|ending| name.ends_with(ending))
            || ["scripts/", "tests/cluster/"].iter().any(|folder| name.starts_with(folder));
        if !program {
            continue;
        }
        for (line, text) in source.lines().enumerate() {
            let Some(what) = skipped(text) else { continue };
            seen += 1;
            if what.is_empty() || what.contains(char::is_whitespace) {
                wrong.push(format!("{name}:{}: {}", line + 1, text.trim()));
            }
        }
    }
    assert!(seen > 20, "{seen} lines found: the search is wrong");
    assert!(wrong.is_empty(), "what is skipped has no name: {wrong:#?}");
}

/// Cargo gives a package that is built for several others the features of all: a program built beside a client that asked for
/// the switches would have them, too.
#[test]
fn only_tests_take_mechanisms_out() {
    for (name, manifest) in files("Cargo.toml") {
        let mut section = "";
        for line in manifest.lines() {
            if line.starts_with('[') {
                section = line;
            }
            let allowed = matches!(section, "[dev-dependencies]" | "[features]");
            assert!(allowed || !line.contains("sabotage"), "{name}: {section}: {line}");
        }
    }
}

/// Names of the switches that a source declares: the variants, or the fields that are true or false, of its `Sabotage`.
fn switches(source: &str) -> Vec<&str> {
    let declared = ["enum", "struct"].map(|kind| format!("{kind} Sabotage {{\n"));
    let Some((_, body)) = declared.iter().find_map(|begin| source.split_once(begin.as_str())) else {
        return Vec::new();
    };
    let lines = body.lines().map(str::trim).take_while(|line| *line != "}");
    lines
        .filter(|line| !line.starts_with(['/', '#']))
        .filter_map(|line| {
            let item = line.strip_suffix(',')?;
            match item.split_once(": ") {
                None => Some(item),
                Some((field, kind)) => (kind == "bool").then(|| field.rsplit(' ').next().unwrap_or(field)),
            }
        })
        .collect()
}

/// A mechanism that no test takes out is one that no test shows to be needed.
#[test]
fn each_mechanism_that_can_be_taken_out_is_taken_out() {
    let takers = ["tests/tests/simulation/main.rs", "datapath/tests/queue/main.rs"]
        .map(|name| fs::read_to_string(root().join(name)).expect(name))
        .concat();
    let (mut seen, mut wrong) = (0, Vec::new());
    for (name, source) in files(".rs") {
        for switch in switches(&source) {
            seen += 1;
            // As a variant, a field, and in the simulation's list.
            let ways = [
                format!("::{switch})"),
                format!("::{switch},"),
                format!(" {switch}: true"),
                format!(" {switch} true;"),
            ];
            if !ways.iter().any(|way| takers.contains(way.as_str())) {
                wrong.push(format!("{name}: {switch}"));
            }
        }
    }
    assert!(seen > 40, "{seen} switches found: the search is wrong");
    assert!(wrong.is_empty(), "no test takes it out: {wrong:#?}");
}

#[test]
fn every_crate_takes_the_lints_of_the_workspace() {
    let manifests = files("Cargo.toml");
    for (name, text) in manifests.iter().filter(|(name, _)| name != "Cargo.toml" && !name.contains("fuzz/")) {
        assert!(text.contains("[lints]\nworkspace = true"), "{name} does not take the workspace's lints");
    }
}

/// Documents name files of the tree in backticks, with or without words of a command behind them.
#[test]
fn files_that_documents_name_exist() {
    let folders: Vec<_> = fs::read_dir(root())
        .expect("the tree")
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name != "target" && root().join(name).is_dir())
        .collect();
    let (mut seen, mut wrong) = (0, Vec::new());
    for (name, text) in files(".md") {
        let prose = text.split("```").step_by(2);
        for quoted in prose.flat_map(|part| part.split('`').skip(1).step_by(2)) {
            let path = quoted.split_whitespace().next().unwrap_or_default();
            let Some((first, _)) = path.split_once('/') else { continue };
            // These signs stand for several names.
            if folders.iter().any(|f| f == first) && !path.contains(['*', '<', '{', '$']) {
                seen += 1;
                if !root().join(path).exists() {
                    wrong.push(format!("{name}: {quoted}"));
                }
            }
        }
    }
    assert!(seen > 50, "{seen} paths found: the search is wrong");
    assert!(wrong.is_empty(), "named and not there: {wrong:#?}");
}

/// Who looks for a way to repeat a run finds it in one table.
#[test]
fn switches_of_the_tests_are_documented() {
    let table = fs::read_to_string(root().join("docs/testing.md")).expect("docs/testing.md");
    let mut wrong = std::collections::BTreeSet::new();
    for (name, text) in files("").iter().filter(|(name, _)| !name.starts_with("docs/")) {
        for (at, _) in text.match_indices("LH_") {
            let word = |c: char| c.is_ascii_uppercase() || c == '_';
            let switch: String = text[at..].chars().take_while(|c| word(*c)).collect();
            let begins = !text[..at].ends_with(|c: char| word(c) || c.is_ascii_alphanumeric());
            if begins && !table.contains(&format!("`{switch}")) {
                wrong.insert(format!("{name}: {switch}"));
            }
        }
    }
    assert!(wrong.is_empty(), "not in docs/testing.md: {wrong:#?}");
}

/// A number of its own, and below the title when it was decided and whether it still holds.
#[test]
fn decisions_are_numbered_and_dated() {
    let mut names: Vec<_> = fs::read_dir(root().join("docs/decisions"))
        .expect("docs/decisions")
        .filter_map(|e| e.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    for (i, name) in names.iter().enumerate() {
        let number = i + 1;
        assert!(name.starts_with(&format!("{number:04}-")), "{name} is not number {number}");
        let text = fs::read_to_string(root().join("docs/decisions").join(name)).expect("a decision");
        let mut lines = text.lines();
        let title = lines.next().unwrap_or_default();
        assert!(title.starts_with(&format!("# {number}. ")), "{name}: {title}");
        let (empty, dated) = (lines.next(), lines.next().unwrap_or_default());
        let (date, status) =
            dated.strip_prefix("Date: ").unwrap_or_default().split_once(". Status: ").unwrap_or_default();
        let digits = |c: char| if c.is_ascii_digit() { '0' } else { c };
        assert!(
            empty == Some("")
                && date.chars().map(digits).eq("0000-00-00".chars())
                && ["accepted.", "replaced by "].iter().any(|word| status.starts_with(word)),
            "{name}: {dated}"
        );
    }
}
