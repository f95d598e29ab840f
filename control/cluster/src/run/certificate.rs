//! The webhook's certificate: made by the leader, kept in a Secret, renewed long before it ends, and told to the API server
//! in the registrations.
//!
//! Each one has an authority of its own, whose key is thrown away when it has signed. The order of a renewal: first the
//! registrations name the new authority beside the old one, then the Secret changes, then managers serve the new
//! certificate. Whoever serves the old one meanwhile is still believed; a leader that dies in between leaves an authority
//! too many, which the next renewal drops.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration, WebhookClientConfig,
};
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, ResourceExt};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose,
};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::Context;
use super::desk::{Done, ReconcileError, is_missing};
use super::queue::Outcome;
use crate::plan::written;

/// The Secret; Longhorn's name.
pub(super) const SECRET: &str = "longhorn-webhook-tls";

/// The registrations; Longhorn's names, so that what a removed Longhorn left behind is taken over.
const MUTATING: &str = "longhorn-webhook-mutator";
const VALIDATING: &str = "longhorn-webhook-validator";

/// The Service by which the API server finds a manager; Longhorn's name.
const SERVICE: &str = "longhorn-admission-webhook";

/// When the certificate is to be renewed, RFC 3339, as an annotation of the Secret.
const RENEW_AFTER: &str = "longhorn.io/renew-after";

/// What is in the Secret, by Kubernetes' names of a Secret of type `kubernetes.io/tls`, and the authorities to be believed.
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
const AUTHORITIES: &str = "ca.crt";

/// How long a certificate is valid, and after what time it is renewed: a cluster may sleep for months.
const VALID: Duration = Duration::from_secs(365 * 24 * 3600);
const RENEWED_AFTER: Duration = Duration::from_secs(120 * 24 * 3600);

/// A clock may be wrong by so much.
const SKEW: Duration = Duration::from_secs(24 * 3600);

/// How often the leader looks whether the registrations, which anybody may apply anew, still name the authority.
const LOOK: Duration = Duration::from_secs(60);

/// A certificate, its key and its authority, in PEM.
struct Made {
    authority: String,
    certificate: String,
    key: String,
}

fn make(namespace: &str, now: SystemTime) -> Result<Made, rcgen::Error> {
    let lasting = |params: &mut CertificateParams, name: &str| {
        params.not_before = (now - SKEW).into();
        params.not_after = (now + VALID).into();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
    };
    let mut authority = CertificateParams::default();
    lasting(&mut authority, "longhorn-webhook-authority");
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let authority_key = KeyPair::generate()?;
    let authority_certificate = authority.self_signed(&authority_key)?;
    let issuer = Issuer::new(authority, authority_key);
    // localhost: for an API server on the same machine that reaches no Service.
    let names = [format!("{SERVICE}.{namespace}.svc"), "localhost".to_owned()];
    let mut own = CertificateParams::new(names)?;
    lasting(&mut own, SERVICE);
    own.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    own.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    own.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate()?;
    let certificate = own.signed_by(&key, &issuer)?;
    Ok(Made {
        authority: authority_certificate.pem(),
        certificate: certificate.pem(),
        key: key.serialize_pem(),
    })
}

/// A part of the Secret as text; empty if it is not there.
fn part<'a>(secret: &'a Secret, name: &str) -> &'a [u8] {
    secret.data.as_ref().and_then(|data| data.get(name)).map_or(&[], |ByteString(bytes)| bytes)
}

/// What is served; `None`: the Secret holds no certificate and key that fit.
fn served(secret: &Secret) -> Option<Arc<ServerConfig>> {
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(part(secret, CERTIFICATE)).collect();
    let key = PrivateKeyDer::from_pem_slice(part(secret, KEY)).ok()?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().ok()?;
    config.with_no_client_auth().with_single_cert(certificates.ok()?, key).ok().map(Arc::new)
}

/// True if the certificate is to be made anew.
fn is_due(secret: Option<&Secret>, now: Timestamp) -> bool {
    let Some(secret) = secret.filter(|s| served(s).is_some()) else { return true };
    let renew: Option<Timestamp> = secret.annotations().get(RENEW_AFTER).and_then(|text| text.parse().ok());
    // Made by a clock that was ahead it is not valid yet, and nobody would renew it for as long.
    renew.is_none_or(|renew| renew <= now || renew > now + RENEWED_AFTER + SKEW)
}

/// The first authority of several: the one that the certificate in use has.
fn newest(authorities: &[u8]) -> &[u8] {
    const END: &[u8] = b"-----END CERTIFICATE-----";
    let end = authorities.windows(END.len()).position(|window| window == END);
    end.map_or(&[], |end| &authorities[..end + END.len()])
}

/// The Secret with a new certificate, in place of the one that there is. The authority before is still to be believed.
fn renewed(made: &Made, old: Option<&Secret>, now: Timestamp) -> Secret {
    let before = old.map_or(&[][..], |secret| newest(part(secret, AUTHORITIES)));
    let mut authorities = made.authority.clone().into_bytes();
    if !before.is_empty() {
        authorities.extend([before, b"\n"].concat());
    }
    let renew = written(now + RENEWED_AFTER);
    let data: BTreeMap<String, ByteString> = [
        (CERTIFICATE.to_owned(), ByteString(made.certificate.clone().into_bytes())),
        (KEY.to_owned(), ByteString(made.key.clone().into_bytes())),
        (AUTHORITIES.to_owned(), ByteString(authorities)),
    ]
    .into();
    Secret {
        metadata: ObjectMeta {
            name: Some(SECRET.to_owned()),
            annotations: Some([(RENEW_AFTER.to_owned(), renew)].into()),
            resource_version: old.and_then(ResourceExt::resource_version),
            ..ObjectMeta::default()
        },
        type_: Some("kubernetes.io/tls".to_owned()),
        data: Some(data),
        ..Secret::default()
    }
}

/// Looks at the certificate: the leader keeps it and the registrations, every manager serves it.
pub(super) async fn look(context: &Context, leads: bool) -> Done<Outcome> {
    let desk = &context.desk;
    let secret = context.cache.secrets.get(SECRET);
    if let Some(secret) = &secret
        && let Some(config) = served(secret)
    {
        context.certificate.send_replace(Some(config));
    }
    if !leads {
        return Ok(Outcome::Done);
    }
    let now = desk.now();
    if !is_due(secret.as_deref(), now) {
        let authorities = secret.as_deref().map(|s| ByteString(part(s, AUTHORITIES).to_vec()));
        register(context, &authorities.unwrap_or_default()).await?;
        return Ok(Outcome::Again(LOOK));
    }
    let made = make(&desk.namespace, SystemTime::now()).map_err(|e| ReconcileError::NotYet(e.to_string()))?;
    let fresh = renewed(&made, secret.as_deref(), now);
    register(context, &ByteString(part(&fresh, AUTHORITIES).to_vec())).await?;
    tracing::info!("a certificate for the webhook was made");
    match secret {
        Some(_) => drop(desk.api::<Secret>().replace(SECRET, &PostParams::default(), &fresh).await?),
        None => desk.create(&fresh).await?,
    }
    Ok(Outcome::Again(LOOK))
}

/// Tells the API server whom to believe. Where nothing is registered, nobody asks.
async fn register(context: &Context, authorities: &ByteString) -> Done {
    let client = &context.desk.client;
    let changed = |config: &mut WebhookClientConfig| {
        let differs = config.ca_bundle.as_ref() != Some(authorities);
        config.ca_bundle = Some(authorities.clone());
        differs
    };
    let api: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
    if let Some(mut registered) = found(api.get(MUTATING).await)? {
        let all = registered.webhooks.iter_mut().flatten().map(|w| changed(&mut w.client_config));
        if all.fold(false, |any, one| any | one) {
            api.replace(MUTATING, &PostParams::default(), &registered).await?;
        }
    }
    let api: Api<ValidatingWebhookConfiguration> = Api::all(client.clone());
    if let Some(mut registered) = found(api.get(VALIDATING).await)? {
        let all = registered.webhooks.iter_mut().flatten().map(|w| changed(&mut w.client_config));
        if all.fold(false, |any, one| any | one) {
            api.replace(VALIDATING, &PostParams::default(), &registered).await?;
        }
    }
    Ok(())
}

fn found<K>(got: kube::Result<K>) -> Done<Option<K>> {
    match got {
        Ok(object) => Ok(Some(object)),
        Err(e) if is_missing(&e) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::SignedDuration;
    use rustls::RootCertStore;
    use rustls::client::WebPkiServerVerifier;
    use rustls::client::danger::ServerCertVerifier;
    use rustls::pki_types::{ServerName, UnixTime};

    use super::*;

    const NAMESPACE: &str = "longhorn-system";

    fn fresh(old: Option<&Secret>) -> Secret {
        renewed(&make(NAMESPACE, SystemTime::now()).unwrap(), old, Timestamp::now())
    }

    /// Whether the certificate of one Secret is believed by who believes the authorities of another.
    fn believes(
        authorities: &Secret,
        certificate: &Secret,
        name: &str,
        after: Duration,
    ) -> Result<(), rustls::Error> {
        let mut roots = RootCertStore::empty();
        for authority in CertificateDer::pem_slice_iter(part(authorities, AUTHORITIES)) {
            roots.add(authority.unwrap()).unwrap();
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build().unwrap();
        let own = CertificateDer::from_pem_slice(part(certificate, CERTIFICATE)).unwrap();
        let now = UnixTime::since_unix_epoch(Duration::from_secs(UnixTime::now().as_secs()) + after);
        verifier
            .verify_server_cert(&own, &[], &ServerName::try_from(name.to_owned()).unwrap(), &[], now)
            .map(drop)
    }

    #[test]
    fn a_certificate_is_of_the_service_and_believed_by_its_authority_alone() {
        let (one, other) = (fresh(None), fresh(None));
        assert!(served(&one).is_some());
        let service = "longhorn-admission-webhook.longhorn-system.svc";
        for name in [service, "localhost"] {
            believes(&one, &one, name, Duration::ZERO).unwrap();
        }
        assert!(believes(&one, &one, "longhorn-admission-webhook.default.svc", Duration::ZERO).is_err());
        assert!(believes(&other, &one, service, Duration::ZERO).is_err());
        believes(&one, &one, service, VALID - SKEW).unwrap();
        assert!(believes(&one, &one, service, VALID + SKEW).is_err());
    }

    #[test]
    fn while_it_is_renewed_both_are_believed_and_later_only_the_last_two() {
        let first = fresh(None);
        let second = fresh(Some(&first));
        let third = fresh(Some(&second));
        for served in [&first, &second] {
            believes(&second, served, "localhost", Duration::ZERO).unwrap();
        }
        believes(&third, &second, "localhost", Duration::ZERO).unwrap();
        assert!(believes(&third, &first, "localhost", Duration::ZERO).is_err());
    }

    #[test]
    fn it_is_renewed_in_time_and_when_it_cannot_be_used() {
        let now = Timestamp::now();
        let secret = fresh(None);
        let later = |by: Duration| now + SignedDuration::try_from(by).unwrap();
        assert!(!is_due(Some(&secret), now));
        assert!(!is_due(Some(&secret), later(RENEWED_AFTER - SKEW)));
        assert!(is_due(Some(&secret), later(RENEWED_AFTER + SKEW)));
        assert!(!is_due(Some(&secret), now - SignedDuration::try_from(SKEW / 2).unwrap()));
        assert!(
            is_due(Some(&secret), now - SignedDuration::try_from(SKEW * 2).unwrap()),
            "the clock was ahead"
        );
        assert!(is_due(None, now));
        let mut damaged = secret.clone();
        damaged.data.as_mut().unwrap().insert(KEY.to_owned(), ByteString(b"nonsense".to_vec()));
        assert!(is_due(Some(&damaged), now));
        let mut unmarked = secret;
        unmarked.metadata.annotations = None;
        assert!(is_due(Some(&unmarked), now));
        assert!(RENEWED_AFTER * 2 < VALID);
    }
}
