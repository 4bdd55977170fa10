//! One module: what goes into its programs, how they are compiled, and what comes out.

use std::path::{Path, PathBuf};

use goblin::elf::Elf;
use hearth_build::cache;
use hearth_build::command::Cmd;
use hearth_build::files::{self, FileError, Log, create_dir, set_mode};
use hearth_build::progress::{Progress, Task};
use ring::digest::{SHA256, digest};

use crate::error::ProgramsError;
use crate::go::Go;
use crate::licences;
use crate::modules::{Module, Program};
use crate::sbom::{Component, Sbom};
use crate::toolchain::Toolchain;

/// Version of the build steps, part of the cache key: must be raised when a change of the steps changes the result.
const RECIPE: u32 = 1;

/// Parts of a result.
const PROGRAMS: &str = "bin";
const LICENCES: &str = "licences";
const SBOM: &str = "sbom.cdx.json";
const VERSION: &str = "version";

/// The libraries of C that a program is linked with: name, archive, and licence.
const C_LIBRARIES: [(&str, &str, &str); 2] = [
    ("glibc", "libc.a", "LGPL-2.1-or-later"),
    ("libseccomp", "libseccomp.a", "LGPL-2.1-only"),
];

/// The programs of a module, in the cache.
#[derive(Debug, Clone)]
pub struct Built {
    entry: PathBuf,
    /// The version of the project, without "v".
    pub version: String,
}

impl Built {
    /// Reads an entry of the cache.
    pub(crate) fn read(entry: &Path, module: &Module) -> Result<Built, ProgramsError> {
        let built = Built {
            version: files::read_text(&entry.join(VERSION))?.trim().to_owned(),
            entry: entry.to_owned(),
        };
        for program in module.programs {
            if !built.program(program.name).is_file() {
                return Err(ProgramsError::Damaged {
                    entry: entry.to_owned(),
                    file: format!("{PROGRAMS}/{}", program.name),
                });
            }
        }
        Ok(built)
    }

    /// The key of the entry, which differs if any of the programs may.
    pub fn key(&self) -> &str {
        let name = self.entry.file_name().and_then(|name| name.to_str());
        name.unwrap_or_default()
    }

    /// One of the programs, or of the files that they read.
    pub fn program(&self, name: &str) -> PathBuf {
        self.programs().join(name)
    }

    /// The folder of the programs, and of the files that they read.
    pub fn programs(&self) -> PathBuf {
        self.entry.join(PROGRAMS)
    }

    /// The licences of everything that is linked into the programs, in one text.
    pub fn licences(&self) -> PathBuf {
        self.entry.join(LICENCES)
    }

    /// The bill of materials.
    pub fn sbom(&self) -> Result<Sbom, ProgramsError> {
        Ok(Sbom::read(&self.entry.join(SBOM))?)
    }

    /// The bill of materials as a file, in the JSON form of CycloneDX.
    pub fn sbom_file(&self) -> PathBuf {
        self.entry.join(SBOM)
    }
}

/// Everything that decides about a module's programs.
pub(crate) struct Inputs<'a> {
    pub(crate) module: &'static Module,
    /// The project's version, with "v".
    pub(crate) version: String,
    toolchain: &'a Toolchain,
    /// go.mod, go.sum and our Go files: path and content, sorted by path.
    files: Vec<(String, String)>,
    /// What is linked with C code: a line for the key, and its libraries.
    c: Option<(String, Vec<Component>)>,
}

impl<'a> Inputs<'a> {
    pub(crate) fn read(
        progress: &dyn Progress,
        sources: &Path,
        module: &'static Module,
        toolchain: &'a Toolchain,
    ) -> Result<Inputs<'a>, ProgramsError> {
        let folder = sources.join(module.name);
        let mut all = Vec::new();
        for entry in files::entries(&folder)? {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name == "go.mod" || name == "go.sum" || name.ends_with(".go") {
                all.push((name, files::read_text(&entry.path())?));
            }
        }
        for replaced in module.replaced {
            let content = files::read_text(&folder.join(replaced.path))?;
            all.push((replaced.path.to_owned(), content));
        }
        all.sort();
        let go_mod = folder.join("go.mod");
        let version = required(&files::read_text(&go_mod)?, module.upstream);
        Ok(Inputs {
            module,
            version: version.ok_or(ProgramsError::NotRequired {
                file: go_mod,
                module: module.upstream,
            })?,
            toolchain,
            files: all,
            c: match module.cgo {
                true => Some(c_libraries(progress)?),
                false => None,
            },
        })
    }

    /// The version of a module that is linked, with "v"; empty if go.mod does not require it.
    fn version_of(&self, module: &str) -> String {
        let go_mod = self.files.iter().find(|(path, _)| path == "go.mod");
        let version = go_mod.and_then(|(_, content)| required(content, module));
        version.unwrap_or_default()
    }

    pub(crate) fn key(&self) -> String {
        let recipe = RECIPE.to_string();
        let flags = self.module.linker_flags(&self.version);
        let tags = self.module.tags.join(",");
        let programs = self.module.programs.iter();
        let mut names: Vec<String> = programs
            .map(|p| format!("{}={}", p.name, p.package))
            .collect();
        let files = self.module.files.iter();
        names.extend(files.map(|(name, path)| format!("{name}={path}")));
        let replaced = self.module.replaced.iter();
        names.extend(replaced.map(|r| format!("{}/{}={}", r.module, r.path, r.upstream)));
        let programs = names.join(" ");
        let c = self.c.as_ref().map_or("", |(line, _)| line);
        let mut parts = vec![
            &*recipe,
            &self.toolchain.version,
            &flags,
            &tags,
            &programs,
            c,
        ];
        for (name, content) in &self.files {
            parts.extend([name.as_str(), content]);
        }
        cache::key(parts)
    }
}

/// The version of a module that a go.mod requires, with "v".
pub(crate) fn required(go_mod: &str, module: &str) -> Option<String> {
    go_mod.lines().find_map(|line| {
        let line = line.trim();
        let mut words = line
            .strip_prefix("require ")
            .unwrap_or(line)
            .split_whitespace();
        let is_it = words.next() == Some(module);
        let version = words.next().filter(|word| is_it && word.starts_with('v'));
        version.map(str::to_owned)
    })
}

/// The C compiler and the libraries that it links: as a text that differs if the result may, and as components.
fn c_libraries(progress: &dyn Progress) -> Result<(String, Vec<Component>), ProgramsError> {
    let ask = |program: &str, args: &[&str]| {
        let answer = Cmd::new(program)
            .args(args)
            .env("LC_ALL", "C")
            .output(progress);
        answer.map(|text| text.lines().next().unwrap_or_default().to_owned())
    };
    let glibc = ask("getconf", &["GNU_LIBC_VERSION"])?;
    let versions = [
        glibc.rsplit(' ').next().unwrap_or_default().to_owned(),
        ask("pkg-config", &["--modversion", "libseccomp"])?,
    ];
    let mut line = format!(
        "{} {}",
        ask("gcc", &["--version"])?,
        ask("ld", &["--version"])?
    );
    let mut components = Vec::new();
    for ((name, archive, licence), version) in C_LIBRARIES.into_iter().zip(versions) {
        let path = ask("gcc", &[&format!("-print-file-name={archive}")])?;
        let hash = hex::encode(digest(&SHA256, &files::read(Path::new(&path))?));
        line += &format!(" {name} {version} {hash}");
        components.push(Component {
            purl: format!("pkg:generic/{name}@{version}"),
            name: name.to_owned(),
            version,
            licence: licence.to_owned(),
            sum: format!("sha256:{hash}"),
        });
    }
    Ok((line, components))
}

/// What a build works with.
pub(crate) struct Work<'a> {
    pub(crate) progress: &'a dyn Progress,
    pub(crate) go: &'a Go<'a>,
    pub(crate) log: &'a mut Log,
    pub(crate) task: &'a dyn Task,
}

impl Work<'_> {
    /// Compiles the programs in `scratch`; returns the folder with the result.
    pub(crate) fn compile(
        &mut self,
        inputs: &Inputs<'_>,
        scratch: &Path,
    ) -> Result<PathBuf, ProgramsError> {
        let source = scratch.join("source");
        let entry = scratch.join("entry");
        let programs = entry.join(PROGRAMS);
        for folder in [&source, &programs] {
            create_dir(folder)?;
        }
        for (path, content) in &inputs.files {
            let file = source.join(path);
            file.parent().map_or(Ok(()), create_dir)?;
            files::write(&file, content)?;
        }
        self.replace(inputs, &source)?;
        let mut components = inputs.c.as_ref().map_or(Vec::new(), |(_, all)| all.clone());
        for program in inputs.module.programs {
            let built = programs.join(program.name);
            self.build(inputs, program, &source, &built)?;
            check_static(program, &built)?;
            set_mode(&built, 0o755)?;
            let info = self.go.cmd("version").args(["-m", "-json"]).arg(&built);
            components.extend(Sbom::linked(program.name, &info.output(self.progress)?)?);
        }
        for (name, path) in inputs.module.files {
            let upstream =
                licences::unpacked(self.go.modules(), inputs.module.upstream, &inputs.version);
            files::write(&programs.join(name), files::read(&upstream.join(path))?)?;
        }
        components.sort_by(|a, b| (&a.name, &a.version).cmp(&(&b.name, &b.version)));
        components.dedup();
        let root = self.go.cmd("env").arg("GOROOT").output(self.progress)?;
        let texts = licences::of(&mut components, self.go.modules(), Path::new(root.trim()))?;
        files::write(&entry.join(LICENCES), texts)?;
        let number = inputs.version.strip_prefix('v').unwrap_or(&inputs.version);
        Sbom::of_program(inputs.module.name, number, &components).write(&entry.join(SBOM))?;
        files::write(&entry.join(VERSION), format!("{number}\n"))?;
        Ok(entry)
    }

    /// Has Go read modules with replaced files from copies in `source`. Fails if upstream's file is not the one that
    /// ours was written for.
    fn replace(&mut self, inputs: &Inputs<'_>, source: &Path) -> Result<(), ProgramsError> {
        for replaced in inputs.module.replaced {
            let download = self.go.cmd("mod").args(["download", replaced.module]);
            download.dir(source).output(self.progress)?;
            let version = inputs.version_of(replaced.module);
            let folder = licences::unpacked(self.go.modules(), replaced.module, &version);
            let file = folder.join(replaced.path);
            let found = hex::encode(digest(&SHA256, &files::read(&file)?));
            if found != replaced.upstream {
                return Err(ProgramsError::Replaced {
                    file,
                    expected: replaced.upstream,
                    found,
                });
            }
            let copy = source.join("modules").join(replaced.module);
            copy_folder(&folder, &copy)?;
            let ours = source.join(replaced.path);
            files::write(&copy.join(replaced.path), files::read(&ours)?)?;
            let edit = format!("-replace={}=./modules/{0}", replaced.module);
            let go_mod = self.go.cmd("mod").args(["edit", &edit]);
            go_mod.dir(source).output(self.progress)?;
        }
        Ok(())
    }

    /// Compiles one program; each line of output is a compiled package.
    fn build(
        &mut self,
        inputs: &Inputs<'_>,
        program: &Program,
        source: &Path,
        to: &Path,
    ) -> Result<(), ProgramsError> {
        let mut cmd = match program.tests {
            false => self.go.cmd("build"),
            // It would also check the code of all that it compiles.
            true => self.go.cmd("test").args(["-c", "-vet=off"]),
        };
        cmd = cmd
            .dir(source)
            .args(["-v", "-trimpath", "-buildvcs=false", "-tags"])
            .arg(inputs.module.tags.join(","))
            .args(["-ldflags", &inputs.module.linker_flags(&inputs.version)])
            .arg("-o")
            .arg(to)
            .arg(program.package);
        if inputs.module.cgo {
            cmd = cmd.env("CGO_ENABLED", "1").env("CC", "gcc");
        }
        cmd.stream(self.progress, |line| {
            self.log.line(line)?;
            self.task.step();
            self.task.now(line);
            Ok(())
        })?;
        Ok(())
    }
}

fn copy_folder(from: &Path, to: &Path) -> Result<(), FileError> {
    create_dir(to)?;
    for entry in files::entries(from)? {
        let (path, copy) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            copy_folder(&path, &copy)?;
        } else {
            files::write(&copy, files::read(&path)?)?;
        }
    }
    Ok(())
}

/// Refuses a program that the node's root file system, which has no libraries for it, cannot run.
fn check_static(program: &Program, file: &Path) -> Result<(), ProgramsError> {
    let bytes = files::read(file)?;
    let loader = Elf::parse(&bytes).ok().and_then(|elf| elf.interpreter);
    match loader {
        None => Ok(()),
        Some(loader) => Err(ProgramsError::Dynamic {
            name: program.name,
            loader: loader.to_owned(),
        }),
    }
}

/// The names of two folders' files that differ.
pub(crate) fn differences(one: &Path, two: &Path) -> Result<Vec<String>, FileError> {
    let mut different = Vec::new();
    for entry in files::entries(one)? {
        let name = entry.file_name();
        if files::read(&entry.path())? != files::read(&two.join(&name))? {
            different.push(name.to_string_lossy().into_owned());
        }
    }
    different.sort();
    Ok(different)
}
