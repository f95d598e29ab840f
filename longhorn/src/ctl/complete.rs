//! `completion`: a script for a shell, which asks this program for what no script knows: the names of volumes, snapshots and
//! replicas.
//!
//! It is asked at each press of a key. So it looks at the root's directories, and asks a volume that is up for nothing but its
//! snapshots. Where there is nothing to tell, or nobody may look, it is silent and succeeds.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::{Arg, ArgAction, CommandFactory};
use clap_complete::Shell;
use control::host::{Root, VolumeRecord};

use super::args::{Output, Program};
use super::output::print;
use super::{Context, snapshot};
use crate::arguments::{DEFAULT_ROOT, ROOT_VARIABLE};

/// How long somebody who has pressed a key may be kept waiting.
const PATIENCE: Duration = Duration::from_secs(1);

/// Of bash: the words up to the cursor go to the program, what it says is added to what the script knows. Options are offered to
/// who has begun one: beside names they would be in the way, and where a file belongs bash would offer none.
///
/// Bash takes words apart at the characters of `COMP_WORDBREAKS`, `=` and `@` among them, and completes the last part alone:
/// they are put together again for the program, and what stands before the last part is taken off what is offered.
const BASH: &str = r#"
_longhornctl_with_names() {
    local line=${COMP_LINE:0:COMP_POINT} words=() known=() word i
    for ((i = 0; i <= COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if ((i == 0)) || [[ -z $word || $line == [[:space:]]* ]]; then
            words+=("$word")
        else
            words[${#words[@]} - 1]+=$word
        fi
        line=${line#"${line%%[![:space:]]*}"}
        line=${line#"$word"}
    done
    local cur=${words[${#words[@]} - 1]} apart=${COMP_WORDBREAKS//[!=:@]/} before=
    # An @ belongs to what follows it (`rl_special_prefixes`).
    [[ -n $apart ]] && before=${cur%"${cur##*[$apart]}"} && before=${before%@}
    if [[ $before == --*= ]]; then
        _longhornctl "$1" "${cur#"$before"}" "${before%=}"
    else
        _longhornctl "$@"
    fi
    # Where the name of a replica belongs, a file does not.
    [[ $3 == --replica || $cur == --replica=* ]] && COMPREPLY=()
    for word in "${COMPREPLY[@]}"; do
        # Placeholders stand for what is to be named.
        case $word in
            '<'*|'['*) ;;
            -*) [[ $cur == -* ]] && known+=("$word") ;;
            *) known+=("$word") ;;
        esac
    done
    COMPREPLY=("${known[@]}")
    while IFS= read -r word; do
        [[ $word == "$cur"* ]] && COMPREPLY+=("${word#"$before"}")
    done < <("${COMP_WORDS[0]}" complete-names -- "${words[@]}" 2>/dev/null)
}
complete -F _longhornctl_with_names -o bashdefault -o default longhornctl
"#;

/// Where the script for bash offers files: a list of words, in which a directory ends the word and a name with a space is two.
const BASH_FILES: &str = "COMPREPLY=($(compgen -f \"${cur}\"))";

/// Of zsh: what takes the place of `_default` where a name belongs.
const ZSH: &str = r#"
_longhornctl_names() {
    local -a line names
    line=(${(z)LBUFFER})
    [[ $LBUFFER == *[[:space:]] ]] && line+=('')
    names=(${(f)"$(longhornctl complete-names -- "${line[@]}" 2>/dev/null)"})
    # What stands before the value of an option is there already.
    (( ${#names} )) && compadd -- "${names[@]#--*=}"
}
"#;

/// Of fish. A quoted variable is one word, also an empty one; files are offered where there is no name.
const FISH: &str = r#"
function __longhornctl_names
    set -l word (commandline -ct)
    set -g __longhornctl_known (longhornctl complete-names -- (commandline -opc) "$word" 2>/dev/null)
    test (count $__longhornctl_known) -gt 0
end
function __longhornctl_values
    __longhornctl_names
    # What stands before the value of an option is there already.
    string replace -r -- '^--[^=]*=' '' $__longhornctl_known
end
complete -c longhornctl -n __longhornctl_names -f -a '$__longhornctl_known'
"#;

/// Arguments whose value is the name of something that there is, as they are called in `args`.
const NAMED: [&str; 5] = ["volume", "source", "name", "names", "replica"];

/// Prints the script.
pub(super) fn script(shell: Shell) -> Result<()> {
    let script = generated(shell);
    print(&match shell {
        // Where it offers nothing bash completes files by itself, and goes on below a directory.
        Shell::Bash => script.replace(BASH_FILES, "COMPREPLY=()") + BASH,
        Shell::Zsh => with_function(&script),
        Shell::Fish => with_values(&script) + FISH,
        _ => script,
    })
}

/// What knows the commands and options.
fn generated(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut without_hidden(&Program::command()), "longhornctl", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// The command with what its help tells of, for scripts: they would offer its hidden commands, too, and none can be taken out of it.
fn without_hidden(command: &clap::Command) -> clap::Command {
    // Clap wants names that stay. The process ends with the script.
    let kept = |name: &str| -> &'static str { name.to_owned().leak() };
    let told = command.get_subcommands().filter(|command| !command.is_hide_set()).map(without_hidden);
    let mut same = clap::Command::new(kept(command.get_name()))
        .aliases(command.get_all_aliases().map(kept).collect::<Vec<_>>())
        .args(command.get_arguments().cloned())
        .groups(command.get_groups().cloned())
        .subcommands(told);
    if let Some(about) = command.get_about() {
        same = same.about(about.clone());
    }
    if let Some(version) = command.get_version() {
        same = same.version(kept(version));
    }
    same
}

/// The script of fish with names where they are an option's value.
fn with_values(script: &str) -> String {
    let line = |line: &str| match line.contains(" -l replica ") {
        true => format!("{line} -f -a '(__longhornctl_values)'\n"),
        false => format!("{line}\n"),
    };
    script.lines().map(line).collect()
}

/// The script of zsh with names where they belong.
fn with_function(script: &str) -> String {
    let is_named = |line: &str| {
        let argument = line.trim_start_matches(['\'', '*', ':', '-']);
        NAMED.iter().any(|id| argument.strip_prefix(id).is_some_and(|rest| rest.starts_with(" -- ")))
            || line.starts_with("'--replica=")
    };
    let line = |line: &str| match is_named(line) {
        true => line.replace(":_default'", ":_longhornctl_names'"),
        false => line.to_owned(),
    };
    let body: String = script.split_inclusive('\n').map(line).collect();
    match body.split_once('\n') {
        // The first line says whose completion it is, and has to stay the first.
        Some((first, rest)) => format!("{first}\n{ZSH}{rest}"),
        None => body,
    }
}

/// Prints what may stand where the cursor is, the last of the words of a command line.
pub(super) async fn names(words: &[String]) -> Result<()> {
    // Whatever is before it on the line.
    let own = words.iter().rposition(|word| word.rsplit('/').next() == Some("longhornctl"));
    let Some(wish) = Wish::of(&words[own.map_or(0, |at| at + 1)..]) else { return Ok(()) };
    let path = wish.root.clone().or_else(|| std::env::var_os(ROOT_VARIABLE).map(PathBuf::from));
    let Ok(root) = Root::at(&path.unwrap_or_else(|| DEFAULT_ROOT.into())) else {
        return Ok(());
    };
    let found = tokio::time::timeout(PATIENCE, wish.names(root)).await.unwrap_or_default();
    // Words that are no names of ours would be read by the shell.
    let last = |name: &str| name.rsplit(['@', '=']).next().unwrap_or(name).to_owned();
    let lines = found.iter().filter(|name| lh_block::check_process_name("name", &last(name)).is_ok());
    print(&lines.map(|name| format!("{name}\n")).collect::<String>())
}

/// What belongs where the cursor is.
#[derive(Debug, Default, PartialEq, Eq)]
struct Wish {
    /// As the line has it.
    root: Option<PathBuf>,
    /// Of [`NAMED`].
    id: String,
    /// The volume that is named before.
    volume: String,
    /// What is there of the word.
    word: String,
}

impl Wish {
    /// `None` where no name belongs.
    fn of(words: &[String]) -> Option<Self> {
        let (word, before) = words.split_last()?;
        let program = Program::command();
        let mut command = &program;
        let (mut wish, mut place) = (Self { word: word.clone(), ..Self::default() }, 0);
        let mut before = before.iter();
        while let Some(said) = before.next() {
            if let Some(option) = said.strip_prefix('-').filter(|rest| !rest.is_empty()) {
                let (name, value) = match option.split_once('=') {
                    Some((name, value)) => (name, Some(value.to_owned())),
                    None => (option, None),
                };
                let takes = takes_value(command, &program, name.trim_start_matches('-'));
                let value = match (takes, value) {
                    (Some(id), None) => match before.next() {
                        Some(value) => Some((id, value.clone())),
                        // The cursor is at its value.
                        None => return (id == "replica").then_some(Self { id, ..wish }),
                    },
                    (Some(id), Some(value)) => Some((id, value)),
                    (None, _) => None,
                };
                match value {
                    Some((id, root)) if id == "root" => wish.root = Some(root.into()),
                    _ => {}
                }
            } else if let Some(found) = command.find_subcommand(said).filter(|_| place == 0) {
                command = found;
            } else {
                if id_at(command, place).as_deref() == Some("volume") {
                    wish.volume.clone_from(said);
                }
                place += 1;
            }
        }
        if let Some(option) = word.strip_suffix(value_in(word)).and_then(|option| option.strip_suffix('=')) {
            let id = takes_value(command, &program, option.trim_start_matches('-'))?;
            return (id == "replica").then_some(Self { id, ..wish });
        }
        wish.id = id_at(command, place)?;
        // A volume that is yet to be made has no name to choose from.
        let is_made = wish.id == "volume" && command.get_name() == "import";
        (NAMED.contains(&wish.id.as_str()) && !word.starts_with('-') && !is_made).then_some(wish)
    }

    async fn names(&self, root: Root) -> Vec<String> {
        let context = Context { root, output: Output::Json };
        let source = self.word.split_once('@').filter(|_| self.id == "source");
        match (self.id.as_str(), source) {
            ("source", Some((volume, _))) => {
                let snapshots = snapshots(&context, volume).await;
                snapshots.into_iter().map(|name| format!("{volume}@{name}")).collect()
            }
            ("volume" | "source", _) => VolumeRecord::list(&context.root).unwrap_or_default(),
            ("replica", _) => {
                let option = self.word.strip_suffix(value_in(&self.word)).unwrap_or_default();
                let record = VolumeRecord::load(&context.root, &self.volume);
                let replicas = record.map(|record| record.replicas).unwrap_or_default();
                replicas.into_iter().map(|replica| format!("{option}{}", replica.name)).collect()
            }
            _ => snapshots(&context, &self.volume).await,
        }
    }
}

async fn snapshots(context: &Context, volume: &str) -> Vec<String> {
    let Ok(record) = VolumeRecord::load(&context.root, volume) else { return Vec::new() };
    let found = snapshot::snapshots(context, &record).await.unwrap_or_default();
    found.into_iter().filter(|s| !s.removed).map(|s| s.name).collect()
}

/// The value in `--OPTION=VALUE`; of any other word, the word.
fn value_in(word: &str) -> &str {
    let option = word.starts_with("--").then(|| word.split_once('=')).flatten();
    option.map_or(word, |(_, value)| value)
}

/// What the option of that name, of a command or of all, is called if it takes a value.
fn takes_value(command: &clap::Command, program: &clap::Command, name: &str) -> Option<String> {
    let is_it = |arg: &&Arg| {
        arg.get_long() == Some(name)
            || arg.get_short().is_some_and(|c| name.len() == 1 && name.starts_with(c))
    };
    let found = command.get_arguments().chain(program.get_arguments()).find(is_it)?;
    matches!(found.get_action(), ArgAction::Set | ArgAction::Append).then(|| found.get_id().to_string())
}

/// What the positional argument at this place is called; the last one may take several.
fn id_at(command: &clap::Command, place: usize) -> Option<String> {
    let several = |arg: &Arg| arg.get_num_args().is_some_and(|n| n.max_values() > 1);
    let all: Vec<&Arg> = command.get_positionals().collect();
    let last = all.last().copied().filter(|arg| several(arg));
    all.get(place).copied().or(last).map(|arg| arg.get_id().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(line: &str) -> Option<(String, String)> {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        Wish::of(&words).map(|wish| (wish.id, wish.volume))
    }

    #[test]
    fn a_name_is_looked_for_where_one_belongs() {
        let found = |id: &str, volume: &str| Some((id.to_owned(), volume.to_owned()));
        for (line, expected) in [
            ("status ", found("volume", "")),
            ("status de", found("volume", "")),
            ("-o json status --watch de", found("volume", "")),
            ("--root /r up ", found("volume", "")),
            ("--root=/r up ", found("volume", "")),
            ("snapshot rm demo ", found("name", "demo")),
            ("snapshot diff demo a ", found("names", "demo")),
            ("replica rebuild demo demo-r-", found("replica", "demo")),
            ("salvage demo --replica ", found("replica", "demo")),
            ("salvage demo --replica=demo-r-", found("replica", "demo")),
            ("salvage demo --replica=", found("replica", "demo")),
            ("up demo --size=", None),
            ("clone de", found("source", "")),
            ("clone demo ", None),
            ("import ", None),
            ("status --", None),
            ("up demo --size ", None),
            ("resize demo ", None),
            ("snapshot ", None),
            ("", None),
        ] {
            assert_eq!(wish(line), expected, "{line:?}");
        }
    }

    #[test]
    fn the_root_of_the_line_counts() {
        let words = ["--root", "/r", "status", ""].map(str::to_owned);
        assert_eq!(Wish::of(&words).unwrap().root, Some("/r".into()));
    }

    /// Words that other programs say, and those that Longhorn's longhornctl has.
    #[test]
    fn no_shell_is_offered_what_help_hides() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish, Shell::Elvish, Shell::PowerShell] {
            let script = generated(shell);
            for word in ["preflight", "trim", "device-name", "complete-names"] {
                assert!(!script.contains(word), "{shell}: {word}");
            }
            assert!(script.contains("frontend"), "{shell}");
        }
    }

    #[test]
    fn in_fish_an_option_whose_value_is_a_name_offers_names() {
        let script = with_values(&generated(Shell::Fish));
        let lines: Vec<&str> = script.lines().filter(|line| line.contains(" -l replica ")).collect();
        assert!(!lines.is_empty() && lines.iter().all(|l| l.ends_with("-r -f -a '(__longhornctl_values)'")));
    }

    #[test]
    fn in_zsh_every_name_is_asked_for() {
        let script = with_function(&generated(Shell::Zsh));
        assert!(script.starts_with("#compdef longhornctl\n"), "{}", &script[..80]);
        let volume = |line: &&str| line.contains(":volume -- ") && line.ends_with(":_default' \\");
        assert_eq!(script.lines().filter(volume).collect::<Vec<_>>(), Vec::<&str>::new());
    }
}
