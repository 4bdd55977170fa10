//! What a machine that is enrolled says of its parameters.
//!
//! It needs none, and uses only a part of those that it has. Whoever has changed them should learn that, whether they meant another cluster
//! or only another address.

use hearth_host::parameters::Loaded;
use hearth_parameters::Cluster;

use crate::machine::SealedState;
use crate::sealed::{Sealed, Stored};

/// Which part of the parameters is used, and which is not; `None` if this machine is not enrolled, or has no parameters.
pub(super) fn note(parameters: &Loaded, sealed: &SealedState) -> Option<String> {
    let SealedState::Stored(Stored::Sealed(Sealed::Founding(_) | Sealed::Member(_))) = sealed
    else {
        return None;
    };
    let found = match parameters {
        Ok(found) => found.as_ref()?,
        Err(error) => {
            return Some(format!(
                "this machine is enrolled and goes on with what it has saved of its former parameters. The present ones cannot \
                 be used: {error}"
            ));
        }
    };
    let (field, remark) = match (&found.parameters.cluster, sealed) {
        (
            Cluster::Register(register),
            SealedState::Stored(Stored::Sealed(Sealed::Member(member))),
        ) if register.ca != member.cluster_ca => {
            ("cluster_register", ", and is of another cluster")
        }
        (Cluster::Register(_), _) => ("cluster_register", ""),
        (Cluster::Bootstrap(_), _) => ("cluster_bootstrap", ""),
    };
    Some(format!(
        "this machine is enrolled. Of the parameters from {}, network_config, unless an operator has set another one, and time_servers are used; {field} is not{remark}",
        found.source
    ))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use hearth_api::v1::{StorageSecurity, StorageSecurityPolicy};
    use hearth_host::parameters::{Found, ParametersError, Problem, Source};
    use hearth_parameters::Register;
    use rustls_pki_types::CertificateDer;

    use super::*;
    use crate::testing;

    fn found(cluster: Cluster) -> Loaded {
        let usual = testing::bootstrap(StorageSecurityPolicy::NeedsInsecure, None);
        Ok(Some(Found {
            source: Source::Esp,
            parameters: hearth_parameters::Parameters { cluster, ..usual },
            ignored: Vec::new(),
        }))
    }

    fn registers_with(ca: &CertificateDer<'static>) -> Loaded {
        let asking = testing::registering(1, None).asking.clone();
        found(Cluster::Register(Register {
            directory: asking.directory,
            ticket: asking.ticket,
            ca: ca.clone(),
            labels: Vec::new(),
        }))
    }

    #[test]
    fn an_enrolled_machine_says_what_it_uses() {
        let ca = CertificateDer::from(b"an authority".to_vec());
        let founding = testing::founding(1, StorageSecurity::Insecure);
        let member = Arc::new(founding.into_member(ca.clone()));
        let member = SealedState::Stored(Stored::Sealed(Sealed::Member(member)));
        let founds = testing::bootstrap(StorageSecurityPolicy::NeedsInsecure, None).cluster;
        let said = |parameters: &Loaded| note(parameters, &member).unwrap();
        assert!(said(&found(founds.clone())).ends_with("used; cluster_bootstrap is not"));
        assert!(said(&registers_with(&ca)).ends_with("used; cluster_register is not"));
        let other = CertificateDer::from(b"another one".to_vec());
        let said_of_other = said(&registers_with(&other));
        assert!(said_of_other.ends_with("cluster_register is not, and is of another cluster"));
        assert!(
            said_of_other.contains("from ESP hearth/parameters.pb"),
            "{said_of_other}"
        );
        let noise = hearth_parameters::parse(&[0xff]).unwrap_err();
        let noise = ParametersError {
            from: Source::Esp,
            problem: Problem::Content(noise),
        };
        assert!(said(&Err(noise)).contains("cannot be used: parameters from ESP"));
        assert_eq!(note(&Ok(None), &member), None);
        // It is not enrolled.
        for sealed in [
            SealedState::Stored(Stored::Absent),
            SealedState::Stored(Stored::Sealed(Sealed::Registering(testing::registering(
                1, None,
            )))),
        ] {
            assert_eq!(note(&found(founds.clone()), &sealed), None);
        }
    }
}
