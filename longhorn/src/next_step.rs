//! The next step that a sentence names (`longhornctl up demo`) is a command that can be given as it stands: with `--root DIR` where
//! volumes lie elsewhere than where commands look by themselves. Whoever forms a sentence, here, in an engine or in the
//! instance manager, writes the command without; it is added where sentences come to people ([`complete`]).

use std::borrow::Cow;
use std::path::Path;
use std::sync::OnceLock;

use clap::Command;

/// What a next step begins with.
const PROGRAM: &str = "longhornctl ";

/// What is put behind the program's name, with a space at its end; empty where nothing is needed. And the program, which says
/// what is a command.
static ADDED: OnceLock<(String, fn() -> Command)> = OnceLock::new();

/// From now on the program's commands are told for this root, which they find by themselves if `is_found` says so.
pub(crate) fn are_for(root: &Path, is_found: bool, program: fn() -> Command) {
    let added = match is_found {
        true => String::new(),
        false => format!("--root {} ", quoted(&root.display().to_string())),
    };
    // A process has one root.
    let _ = ADDED.set((added, program));
}

/// The text with every command of `longhornctl` as it is to be given. Twice is as good as once.
pub(crate) fn complete(text: &str) -> Cow<'_, str> {
    match ADDED.get() {
        Some((added, program)) if !added.is_empty() && text.contains(PROGRAM) => {
            with(added, &program(), text).into()
        }
        _ => text.into(),
    }
}

fn with(added: &str, program: &Command, text: &str) -> String {
    let mut parts = text.split(PROGRAM);
    let mut whole = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        // A path that ends so, and the name in a sentence, are no commands.
        let begins = whole.is_empty() || whole.ends_with([' ', '`', '(', '\n', '\t']);
        let word = part.split(|c: char| c != '-' && !c.is_alphanumeric()).next().unwrap_or_default();
        let is_command = begins && program.find_subcommand(word).is_some();
        whole += PROGRAM;
        whole += if is_command { added } else { "" };
        whole += part;
    }
    whole
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@%,=".contains(c);
    match word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::ctl::Program;

    #[test]
    fn a_command_is_told_with_its_root_and_nothing_else_is_changed() {
        let told = |text: &str| with("--root /srv ", &Program::command(), text);
        assert_eq!(told("longhornctl up NAME makes one"), "longhornctl --root /srv up NAME makes one");
        assert_eq!(
            told("stop it (`longhornctl down v`) && longhornctl snapshot rm v s"),
            "stop it (`longhornctl --root /srv down v`) && longhornctl --root /srv snapshot rm v s"
        );
        for text in
            ["longhorn beside longhornctl is it", "/opt/longhornctl up", "`longhornctl --root /a ls`", ""]
        {
            assert_eq!(told(text), text);
        }
        let once = told("`longhornctl status v --watch`");
        assert_eq!(told(&once), once);
    }

    #[test]
    fn a_root_is_one_word_of_a_shell() {
        assert_eq!(quoted("/var/lib/longhorn"), "/var/lib/longhorn");
        assert_eq!(quoted("/srv/my disk/it's"), r"'/srv/my disk/it'\''s'");
    }
}
