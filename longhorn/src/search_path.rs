//! Where programs of the system are looked for.

use std::ffi::OsString;

/// Where a system has what is for its administrator alone. A job of cron and `su` without `-` leave these out of PATH.
const ADMINISTRATORS: &str = "/usr/local/sbin:/usr/sbin:/sbin";

/// Where without PATH is looked (`execvp(3)`).
const USUAL: &str = "/bin:/usr/bin";

/// PATH for a program of the system: that of this process, and the places of the administrator behind it.
pub(crate) fn search_path() -> OsString {
    completed(std::env::var_os("PATH"))
}

fn completed(own: Option<OsString>) -> OsString {
    let mut places = own.filter(|places| !places.is_empty()).unwrap_or_else(|| USUAL.into());
    places.push(":");
    places.push(ADMINISTRATORS);
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_of_the_administrator_are_found_behind_all_others() {
        assert_eq!(completed(Some("/opt/bin:/bin".into())), "/opt/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin");
        for none in [None, Some("".into())] {
            assert_eq!(completed(none), "/bin:/usr/bin:/usr/local/sbin:/usr/sbin:/sbin");
        }
    }
}
