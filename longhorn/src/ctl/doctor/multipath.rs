//! multipathd, which lays a device of its own over disks, and then has them open: nobody can mount or let go of them.
//!
//! Left to itself it looks at the kernel's SCSI, NVMe and DASD disks alone. Of this program's devices that is the disk which the
//! host's iSCSI initiator makes. What its configuration keeps it away from, by the kernel's name of a disk or by who made
//! it, is read as multipath.conf(5) has it, as far as such disks are concerned; what cannot be made out is warned of.

use std::fs;
use std::path::Path;

use super::Finding;

const CHECK: &str = "multipath";

/// What an iSCSI disk of a volume says who made it (INQUIRY, T10 VENDOR IDENTIFICATION).
const VENDOR: &str = "LONGHORN";

/// Where the configuration is: a file, and more of them in a directory.
const FILE: &str = "/etc/multipath.conf";
const DIRECTORY: &str = "/etc/multipath/conf.d";

pub(super) fn finding(processes: &[String]) -> Finding {
    let mut config = fs::read_to_string(FILE).unwrap_or_default();
    for entry in fs::read_dir(DIRECTORY).into_iter().flatten().flatten() {
        if entry.path().extension().is_some_and(|e| e == "conf") {
            config.push('\n');
            config.push_str(&fs::read_to_string(entry.path()).unwrap_or_default());
        }
    }
    judge(processes.iter().any(|name| name == "multipathd"), &config)
}

fn judge(runs: bool, config: &str) -> Finding {
    if !runs || leaves_volumes(config) {
        return Finding::ok(CHECK, "takes no volume's disk");
    }
    Finding::warn(
        CHECK,
        "multipathd runs and may take the disks of --frontend iscsi",
        format!(
            "blacklist {{ device {{ vendor \"{VENDOR}\" product \".*\" }} }} in {}, and multipathd reconfigure",
            Path::new(DIRECTORY).join("longhorn.conf").display()
        ),
    )
}

/// True if a blacklist names volumes' disks, and no exception takes that back.
fn leaves_volumes(config: &str) -> bool {
    named_in(config, "blacklist") && !named_in(config, "blacklist_exceptions")
}

/// True if a list of that name has a line that means the disks which the initiator makes.
fn named_in(config: &str, list: &str) -> bool {
    let mut sections: Vec<String> = Vec::new();
    let mut words = words(config).into_iter().peekable();
    while let Some(word) = words.next() {
        match word.as_str() {
            "}" => drop(sections.pop()),
            _ if words.peek().is_some_and(|next| next == "{") => {
                words.next();
                sections.push(word);
            }
            "devnode" if sections == [list] && words.peek().is_some_and(|value| means(value, "sd")) => {
                return true;
            }
            "vendor"
                if sections == [list, "device"] && words.peek().is_some_and(|value| means(value, VENDOR)) =>
            {
                return true;
            }
            _ => {}
        }
    }
    false
}

/// True if one of the expression's alternatives begins with `name`, or is everything. Inverted ones (`!`) mean nothing here.
fn means(expression: &str, name: &str) -> bool {
    let alternatives = expression.split(['|', '(', ')']).map(|one| one.trim_start_matches('^'));
    !expression.starts_with('!')
        && alternatives.into_iter().any(|one| one.starts_with(name) || matches!(one, ".*" | "*"))
}

/// The words of a configuration: braces, what is in quotes, what is between blanks. `#` and `!` begin a comment, but not within a
/// word.
fn words(config: &str) -> Vec<String> {
    let mut all = Vec::new();
    for line in config.lines() {
        let mut rest = line.trim_start();
        while let Some(first) = rest.chars().next() {
            let (word, after) = match first {
                '#' | '!' => break,
                '{' | '}' => rest.split_at(1),
                '"' => {
                    let inside = &rest[1..];
                    inside.split_once('"').unwrap_or((inside, ""))
                }
                _ => rest.split_at(rest.find([' ', '\t', '{', '}', '"']).unwrap_or(rest.len())),
            };
            all.push(word.to_owned());
            rest = after.trim_start();
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn only_a_blacklist_that_means_a_volumes_disk_is_taken_for_one() {
        for leaves in [
            "blacklist { devnode \"^sd[a-z0-9]+\" }",
            "blacklist {\n\tdevnode \"^(ram|loop|sd)[0-9a-z]*\" # all\n}",
            "blacklist {\n  device {\n    vendor \"LONGHORN\"\n    product \".*\"\n  }\n}",
            "blacklist { device { vendor \".*\" } }\nblacklist_exceptions { device { vendor \"NETAPP\" } }",
            "defaults { user_friendly_names yes }\nblacklist{devnode ^sd}",
        ] {
            assert_eq!(judge(true, leaves).verdict, Verdict::Ok, "{leaves}");
        }
        for takes in [
            "",
            "defaults { find_multipaths no }",
            "# blacklist { devnode \"^sd[a-z0-9]+\" }",
            "blacklist { devnode \"^(ram|loop)\" }\n# no sd here\ndefaults { user_friendly_names yes }",
            "blacklist { devnode \"!^(sd[a-z]|nvme[0-9])\" }",
            "blacklist { device { vendor \"IET\" product \"VIRTUAL-DISK\" } }",
            "devices { device { vendor \"LONGHORN\" } }",
            "blacklist { wwid \".*\" }\nblacklist_exceptions { devnode \"^sda\" }",
            "blacklist { devnode \"^sd\" }\nblacklist_exceptions { device { vendor \"LONGHORN\" } }",
        ] {
            assert_eq!(judge(true, takes).verdict, Verdict::Warn, "{takes}");
            assert_eq!(judge(false, takes).verdict, Verdict::Ok, "nobody runs");
        }
        assert_eq!(iscsi_frontend::scsi::Identity::of_volume("demo").vendor, VENDOR);
        let advice = judge(true, "").next;
        let (line, _) = advice.split_once(" in /etc").unwrap();
        assert!(leaves_volumes(line), "what is advised serves: {line}");
    }
}
