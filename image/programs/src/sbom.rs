//! Bills of materials, in the JSON form of CycloneDX.
//!
//! What a Go program consists of is written in the program: the compiler adds the list of the modules that were linked,
//! each with its version and its hash in `go.sum`. So the bill describes the program itself, and not what a go.mod
//! would have allowed. It has neither time nor serial number: the same program has the same bill.

use std::path::Path;

use hearth_build::files;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::SbomError;

/// The name that Go's own libraries have among modules.
pub(crate) const STANDARD_LIBRARY: &str = "std";

/// A bill of materials: something, and what it consists of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sbom {
    document: Value,
}

/// A part of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Component {
    /// Its name; for a Go module, its path.
    pub name: String,
    /// Its version.
    pub version: String,
    /// The URL that names it in every bill.
    pub purl: String,
    /// Its licence, as an SPDX expression.
    pub licence: String,
    /// Its hash, with the kind of hash; empty if it is not as upstream published it.
    pub sum: String,
}

/// What `go version -m -json` prints of a program.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct BuildInformation {
    go_version: String,
    main: GoModule,
    #[serde(default)]
    deps: Vec<GoModule>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct GoModule {
    path: String,
    #[serde(default)]
    version: String,
    #[serde(default)]
    sum: String,
    /// What is linked instead: another module, or a folder with files of ours, which has no hash.
    replace: Option<Box<GoModule>>,
}

impl GoModule {
    /// The module as it is published.
    fn published(self) -> GoModule {
        match self.replace {
            Some(other) if !other.sum.is_empty() => *other,
            _ => self,
        }
    }
}

impl Sbom {
    /// What was linked into a program, by its build information; licences are not known yet. A main package of ours is
    /// not among it.
    pub(crate) fn linked(program: &'static str, info: &str) -> Result<Vec<Component>, SbomError> {
        let info: BuildInformation = serde_json::from_str(info)
            .map_err(|source| SbomError::BuildInformation { program, source })?;
        let version = info.go_version.trim_start_matches("go").to_owned();
        let modules = std::iter::once(info.main).chain(info.deps);
        let mut all: Vec<Component> = modules
            .map(GoModule::published)
            .filter(|module| !module.sum.is_empty() || module.replace.is_some())
            .map(|module| Component {
                purl: format!("pkg:golang/{}@{}", module.path, module.version),
                name: module.path,
                version: module.version,
                licence: String::new(),
                sum: module.sum,
            })
            .collect();
        all.push(Component {
            purl: format!("pkg:golang/{STANDARD_LIBRARY}@{version}"),
            name: STANDARD_LIBRARY.to_owned(),
            version,
            licence: String::new(),
            sum: String::new(),
        });
        Ok(all)
    }

    /// The bill of a program, or of several that are built together.
    pub fn of_program(name: &str, version: &str, components: &[Component]) -> Sbom {
        let components = components.iter().map(Component::to_json).collect();
        Sbom::new("application", name, version, components)
    }

    /// The bill of something that consists of programs, and of files from elsewhere.
    pub fn of_whole(name: &str, version: &str, programs: &[Sbom], others: &[Component]) -> Sbom {
        let mut all: Vec<Value> = programs.iter().map(Sbom::as_component).collect();
        all.extend(others.iter().map(Component::to_json));
        Sbom::new("operating-system", name, version, all)
    }

    fn new(kind: &str, name: &str, version: &str, components: Vec<Value>) -> Sbom {
        Sbom {
            document: json!({
                "bomFormat": "CycloneDX",
                "specVersion": "1.6",
                "version": 1,
                "metadata": { "component": { "type": kind, "name": name, "version": version } },
                "components": components,
            }),
        }
    }

    /// The subject of this bill as a component of another, with its own components.
    fn as_component(&self) -> Value {
        let mut component = self.document["metadata"]["component"].clone();
        component["components"] = self.document["components"].clone();
        component
    }

    pub(crate) fn read(file: &Path) -> Result<Sbom, SbomError> {
        let document = serde_json::from_slice(&files::read(file)?);
        let document = document.map_err(|source| SbomError::Malformed {
            file: file.to_owned(),
            source,
        })?;
        Ok(Sbom { document })
    }

    /// Writes the bill into a file.
    pub fn write(&self, file: &Path) -> Result<(), SbomError> {
        Ok(files::write(file, format!("{:#}\n", self.document))?)
    }
}

impl Component {
    fn to_json(&self) -> Value {
        let mut component = json!({
            "type": "library",
            "name": self.name,
            "version": self.version,
            "purl": self.purl,
            "licenses": [{ "expression": self.licence }],
        });
        if !self.sum.is_empty() {
            component["properties"] = json!([{ "name": "hearth:sum", "value": self.sum }]);
        }
        component
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INFO: &str = r#"{
        "GoVersion": "go1.26.8",
        "Path": "example.com/a/cmd/a",
        "Main": { "Path": "example.com/a", "Version": "v1.2.3", "Sum": "h1:one" },
        "Deps": [ { "Path": "example.com/b", "Version": "v0.1.0", "Sum": "h1:two" } ],
        "Settings": []
    }"#;

    #[test]
    fn a_program_tells_what_it_consists_of() {
        let all = Sbom::linked("a", INFO).unwrap();
        let names: Vec<&str> = all.iter().map(|component| &*component.purl).collect();
        assert_eq!(
            names,
            [
                "pkg:golang/example.com/a@v1.2.3",
                "pkg:golang/example.com/b@v0.1.0",
                "pkg:golang/std@1.26.8"
            ]
        );
        // A main package of ours has no version and no hash.
        let ours = INFO.replace(
            r#""Version": "v1.2.3", "Sum": "h1:one""#,
            r#""Version": "(devel)""#,
        );
        assert_eq!(Sbom::linked("a", &ours).unwrap().len(), 2);
        // A module with a file of ours has no hash.
        let replaced = INFO.replace(
            r#""Sum": "h1:two""#,
            r#""Replace": { "Path": "./modules/example.com/b" }"#,
        );
        let all = Sbom::linked("a", &replaced).unwrap();
        assert_eq!((&*all[1].name, &*all[1].sum), ("example.com/b", ""));
        // A module in whose place another one is linked.
        let fork = INFO.replace(
            r#""Sum": "h1:two""#,
            r#""Replace": { "Path": "example.com/fork", "Version": "v2.0.0", "Sum": "h1:fork" }"#,
        );
        let all = Sbom::linked("a", &fork).unwrap();
        assert_eq!(all[1].purl, "pkg:golang/example.com/fork@v2.0.0");
        assert!(Sbom::linked("a", "{}").is_err());
    }

    #[test]
    fn a_whole_has_its_programs_with_their_parts() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.cdx.json");
        Sbom::of_program("a", "1.2.3", &Sbom::linked("a", INFO).unwrap())
            .write(&file)
            .unwrap();
        let program = Sbom::read(&file).unwrap();
        let whole = Sbom::of_whole("bundle", "1", &[program], &[]);
        let component = &whole.document["components"][0];
        assert_eq!(component["name"], "a");
        assert_eq!(
            component["components"][1]["properties"][0]["value"],
            "h1:two"
        );
        assert_eq!(whole.document["metadata"]["component"]["name"], "bundle");
    }
}
