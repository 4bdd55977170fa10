//! No circles between the modules of a crate.
//!
//! The nodes are modules, at each level by themselves: the top-level modules of a crate, and below each module its children.
//! Whatever stands in a module or below it and names something in a sibling of that module, or below the sibling, is an arrow
//! from the one to the other. A module and what is inside it are one thing: that a parent uses its children, and a child what
//! its parent defines, is no arrow; what a parent merely imports, a child that names it gets from where it is defined.
//!
//! A name is a `use`, nested or not, or a path in code, arguments of macros included. It is looked up as the compiler does it:
//! through `crate`, `self` and `super`, imports, re-exports and globs, and is an arrow to each module on that way. Not seen
//! are names that no source spells: methods, and what macros and build scripts generate. What only tests compile is left out,
//! and so are comments, links in documentation included. The feature `testing` is code as all other.
//!
//! The compiler would allow it all, which is why this is no search by lines: a crate that is split later has to be split
//! along these arrows.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use proc_macro2::{TokenStream, TokenTree};
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{
    Attribute, Field, ImplItem, ImplItemConst, ImplItemFn, ImplItemType, Item, ItemConst, ItemEnum,
    ItemFn, ItemImpl, ItemMacro, ItemMod, ItemStatic, ItemStruct, ItemTrait, ItemType, ItemUnion,
    ItemUse, Local, Meta, MetaList, Token, UseTree,
};

use super::crates::{Metadata, Target};

/// More re-exports in a row than anybody writes; imports that import each other end here.
const MAX_DEPTH: usize = 16;

/// A path as it is written, in words.
type Words = Vec<String>;

#[derive(Default)]
struct Module {
    name: String,
    /// The root's is itself.
    parent: usize,
    file: PathBuf,
    children: BTreeMap<String, usize>,
    items: BTreeSet<String>,
    imports: BTreeMap<String, Words>,
    globs: Vec<Words>,
    named: Vec<(usize, Words)>,
}

/// The modules of one crate; the first is the root.
struct Modules(Vec<Module>);

/// Where a path leads.
struct Found {
    /// The modules on the way; the last is the one that is meant, or that has what is meant.
    way: Vec<usize>,
    module: bool,
}

/// Looks into libraries and binaries; tests, examples and build scripts are too small to have circles that matter.
pub(super) fn between_modules(
    root: &Path,
    metadata: &Metadata,
    wrong: &mut Vec<String>,
) -> Result<()> {
    for package in metadata.ours() {
        let is_product = |target: &&Target| {
            target
                .kind
                .iter()
                .any(|kind| kind == "lib" || kind == "bin")
        };
        for target in package.targets.iter().filter(is_product) {
            let mut modules = Modules(vec![Module::default()]);
            let folder = target.src_path.parent().unwrap_or(root);
            modules.read(root, 0, &target.src_path, folder)?;
            let circles = modules.circles().into_iter();
            wrong.extend(circles.map(|circle| format!("{}: {circle}", package.name)));
        }
    }
    Ok(())
}

impl Modules {
    fn read(&mut self, root: &Path, at: usize, file: &Path, folder: &Path) -> Result<()> {
        let context = || file.display().to_string();
        let text = fs::read_to_string(file).with_context(context)?;
        let syntax = syn::parse_file(&text).with_context(context)?;
        self.0[at].file = file.strip_prefix(root).unwrap_or(file).to_owned();
        for (child, name) in self.add(at, &syntax.items, "") {
            let flat = folder.join(format!("{name}.rs"));
            let nested = folder.join(&name).join("mod.rs");
            let file = if flat.is_file() { flat } else { nested };
            self.read(root, child, &file, &folder.join(name))?;
        }
        Ok(())
    }

    /// Adds what a module consists of. Gives those below it that stand in files of their own, by their folders.
    fn add(&mut self, at: usize, items: &[Item], below: &str) -> Vec<(usize, String)> {
        let mut elsewhere = Vec::new();
        for item in items
            .iter()
            .filter(|item| !only_for_tests(attributes(item)))
        {
            if let Item::Use(item) = item {
                self.import(at, item);
            }
            let Item::Mod(module) = item else {
                self.0[at].items.extend(name_of(item));
                Names(&mut self.0[at]).visit_item(item);
                continue;
            };
            let name = module.ident.to_string();
            let child = self.0.len();
            self.0.push(Module {
                name: name.clone(),
                parent: at,
                file: self.0[at].file.clone(),
                ..Module::default()
            });
            self.0[at].children.insert(name.clone(), child);
            let folder = format!("{below}{name}");
            match &module.content {
                Some((_, items)) => elsewhere.extend(self.add(child, items, &format!("{folder}/"))),
                None => elsewhere.push((child, folder)),
            }
        }
        elsewhere
    }

    fn import(&mut self, at: usize, item: &ItemUse) {
        if item.leading_colon.is_some() {
            return;
        }
        each_import(&item.tree, &mut Vec::new(), &mut |name, path| match name {
            Some(name) => drop(self.0[at].imports.insert(name, path)),
            None => self.0[at].globs.push(path),
        });
    }

    /// Where a path leads that is written in a module. Nothing if that is out of the crate.
    fn resolve(&self, from: usize, path: &[String], depth: usize) -> Option<Found> {
        let mut at = from;
        let mut way = Vec::new();
        for (index, word) in path.iter().enumerate() {
            match word.as_str() {
                "crate" if index == 0 => at = 0,
                "self" if index == 0 => {}
                "super" => at = self.0[at].parent,
                word => match self.look_up(at, word, depth) {
                    Some(next) => {
                        way.extend(&next.way);
                        at = *next.way.last()?;
                        if !next.module {
                            return Some(Found { way, module: false });
                        }
                    }
                    None if index == 0 => return None,
                    // Generated there, or another crate's and imported there.
                    None => return Some(Found { way, module: false }),
                },
            }
            way.push(at);
        }
        Some(Found { way, module: true })
    }

    /// What a word means in a module.
    fn look_up(&self, at: usize, word: &str, depth: usize) -> Option<Found> {
        let module = &self.0[at];
        if let Some(child) = module.children.get(word) {
            let way = vec![*child];
            return Some(Found { way, module: true });
        }
        if module.items.contains(word) {
            let way = vec![at];
            return Some(Found { way, module: false });
        }
        if depth == MAX_DEPTH {
            return None;
        }
        if let Some(import) = module.imports.get(word) {
            return self.resolve(at, import, depth + 1);
        }
        let of_ours = |glob: &&Words| {
            matches!(glob[0].as_str(), "crate" | "self" | "super")
                || module.children.contains_key(&glob[0])
                || module.imports.contains_key(&glob[0])
        };
        module.globs.iter().filter(of_ours).find_map(|glob| {
            let Found { mut way, module } = self.resolve(at, glob, depth + 1)?;
            let found = self.look_up(*way.last().filter(|_| module)?, word, depth + 1)?;
            way.extend(found.way);
            let module = found.module;
            Some(Found { way, module })
        })
    }

    /// Each arrow between two children of one module, by that module; with the first place that makes it one.
    fn arrows(&self) -> BTreeMap<usize, BTreeMap<usize, BTreeMap<usize, String>>> {
        let mut arrows: BTreeMap<usize, BTreeMap<usize, BTreeMap<usize, String>>> = BTreeMap::new();
        for (from, module) in self.0.iter().enumerate() {
            for (line, words) in &module.named {
                let found = self.resolve(from, words, 0);
                // A word that is nothing but a module's is a variable's, too.
                let found = found.filter(|found| words.len() > 1 || !found.module);
                for to in found.into_iter().flat_map(|found| found.way) {
                    let Some((level, from, to)) = self.siblings(from, to) else {
                        continue;
                    };
                    let place = || format!("{}:{line}", module.file.display());
                    let of_level = arrows.entry(level).or_default();
                    let of_module = of_level.entry(from).or_default();
                    of_module.entry(to).or_insert_with(place);
                }
            }
        }
        arrows
    }

    /// The two modules side by side that these are, or are in, and the module that both are in.
    fn siblings(&self, from: usize, to: usize) -> Option<(usize, usize, usize)> {
        let (from, to) = (self.path(from), self.path(to));
        let apart = from.iter().zip(&to).position(|(from, to)| from != to)?;
        Some((from[apart - 1], from[apart], to[apart]))
    }

    /// The root, and so on, and the module.
    fn path(&self, mut at: usize) -> Vec<usize> {
        let mut path = vec![at];
        while at != 0 {
            at = self.0[at].parent;
            path.push(at);
        }
        path.reverse();
        path
    }

    fn circles(&self) -> Vec<String> {
        let mut circles = Vec::new();
        for arrows in self.arrows().values() {
            let mut told = BTreeSet::new();
            for start in arrows.keys() {
                if told.contains(start) {
                    continue;
                }
                let Some(circle) = shortest_circle(arrows, *start) else {
                    continue;
                };
                told.extend(circle.iter().map(|(from, _)| *from));
                let parts = circle.iter().map(|(from, to)| {
                    let (from_name, to_name) = (self.full_name(*from), self.full_name(*to));
                    format!("{from_name} names {to_name} ({})", arrows[from][to])
                });
                circles.push(parts.collect::<Vec<_>>().join(", "));
            }
        }
        circles
    }

    fn full_name(&self, at: usize) -> String {
        let path = self.path(at);
        let names = path.iter().skip(1).map(|at| self.0[*at].name.as_str());
        names.collect::<Vec<_>>().join("::")
    }
}

fn shortest_circle<T>(
    arrows: &BTreeMap<usize, BTreeMap<usize, T>>,
    start: usize,
) -> Option<Vec<(usize, usize)>> {
    let mut reached_from = BTreeMap::new();
    let mut pending = VecDeque::from([start]);
    while let Some(from) = pending.pop_front() {
        for to in arrows.get(&from).into_iter().flat_map(BTreeMap::keys) {
            if !reached_from.contains_key(to) {
                reached_from.insert(*to, from);
                pending.push_back(*to);
            }
        }
    }
    let mut circle = vec![(*reached_from.get(&start)?, start)];
    while circle[0].0 != start {
        let to = circle[0].0;
        circle.insert(0, (reached_from[&to], to));
    }
    Some(circle)
}

/// Collects the paths that an item of a module spells.
struct Names<'a>(&'a mut Module);

impl Names<'_> {
    /// Paths among tokens that no grammar is known for.
    fn scan(&mut self, tokens: TokenStream) {
        let mut words: Words = Vec::new();
        let mut line = 0;
        let mut colons = 0;
        for token in tokens {
            match &token {
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                TokenTree::Ident(ident) => {
                    if colons != 2 || words.is_empty() {
                        self.name(line, std::mem::take(&mut words));
                        line = ident.span().start().line;
                    }
                    words.push(ident.to_string());
                    colons = 0;
                }
                other => {
                    self.name(line, std::mem::take(&mut words));
                    colons = 0;
                    if let TokenTree::Group(group) = other {
                        self.scan(group.stream());
                    }
                }
            }
        }
        self.name(line, words);
    }

    fn name(&mut self, line: usize, words: Words) {
        if !words.is_empty() {
            self.0.named.push((line, words));
        }
    }
}

impl<'ast> Visit<'ast> for Names<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if !only_for_tests(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        let attributes: &[Attribute] = match item {
            ImplItem::Const(ImplItemConst { attrs, .. })
            | ImplItem::Fn(ImplItemFn { attrs, .. })
            | ImplItem::Type(ImplItemType { attrs, .. }) => attrs,
            _ => &[],
        };
        if !only_for_tests(attributes) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_field(&mut self, field: &'ast Field) {
        if !only_for_tests(&field.attrs) {
            visit::visit_field(self, field);
        }
    }

    fn visit_local(&mut self, local: &'ast Local) {
        if !only_for_tests(&local.attrs) {
            visit::visit_local(self, local);
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        let line = item.use_token.span.start().line;
        if item.leading_colon.is_none() {
            each_import(&item.tree, &mut Vec::new(), &mut |_, path| {
                self.name(line, path);
            });
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            let words = path
                .segments
                .iter()
                .map(|segment| segment.ident.to_string());
            let line = path
                .segments
                .first()
                .map_or(0, |first| first.ident.span().start().line);
            self.name(line, words.collect());
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.visit_path(&call.path);
        self.scan(call.tokens.clone());
    }

    fn visit_attribute(&mut self, _: &'ast Attribute) {}

    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}
}

/// Each name that an import brings, and its path; a glob brings none.
fn each_import(tree: &UseTree, before: &mut Words, each: &mut dyn FnMut(Option<String>, Words)) {
    let (word, name) = match tree {
        UseTree::Path(path) => {
            before.push(path.ident.to_string());
            each_import(&path.tree, before, each);
            before.pop();
            return;
        }
        UseTree::Group(group) => {
            for tree in &group.items {
                each_import(tree, before, each);
            }
            return;
        }
        UseTree::Glob(_) => return each(None, before.clone()),
        UseTree::Name(name) => (&name.ident, None),
        UseTree::Rename(rename) => (&rename.ident, Some(rename.rename.to_string())),
    };
    let mut path = before.clone();
    if word != "self" || path.is_empty() {
        path.push(word.to_string());
    }
    each(name.or_else(|| path.last().cloned()), path);
}

/// Whether the condition of something never holds but in tests.
fn only_for_tests(attributes: &[Attribute]) -> bool {
    let mut conditions = attributes
        .iter()
        .filter(|attribute| attribute.path().is_ident("cfg"));
    conditions.any(|attribute| {
        attribute
            .parse_args()
            .is_ok_and(|condition| never(&condition))
    })
}

fn never(condition: &Meta) -> bool {
    let parts = |list: &MetaList| {
        let parts = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated);
        parts.into_iter().flatten().collect::<Vec<_>>()
    };
    match condition {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("all") => parts(list).iter().any(never),
        Meta::List(list) if list.path.is_ident("any") => parts(list).iter().all(never),
        _ => false,
    }
}

fn name_of(item: &Item) -> Option<String> {
    let ident = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(ident.to_string())
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(ItemConst { attrs, .. })
        | Item::Enum(ItemEnum { attrs, .. })
        | Item::Fn(ItemFn { attrs, .. })
        | Item::Impl(ItemImpl { attrs, .. })
        | Item::Macro(ItemMacro { attrs, .. })
        | Item::Mod(ItemMod { attrs, .. })
        | Item::Static(ItemStatic { attrs, .. })
        | Item::Struct(ItemStruct { attrs, .. })
        | Item::Trait(ItemTrait { attrs, .. })
        | Item::Type(ItemType { attrs, .. })
        | Item::Union(ItemUnion { attrs, .. })
        | Item::Use(ItemUse { attrs, .. }) => attrs,
        _ => &[],
    }
}

#[cfg(test)]
mod tests;
