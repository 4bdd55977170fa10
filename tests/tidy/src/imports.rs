//! Checks that imports have one style: a `use` for each module, and std, other crates and this crate in this order.
//!
//! The style is that of rustfmt's `imports_granularity = "Module"` and `group_imports = "StdExternalCrate"`, which only
//! its nightly version offers. What stable rustfmt decides, the order within a group, is left to it.

use std::collections::BTreeSet;

use anyhow::Result;
use proc_macro2::Span;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Block, File, Item, ItemMod, ItemUse, Stmt, UseTree, Visibility};

use super::sources::Sources;

pub(super) fn have_one_style(sources: &Sources, wrong: &mut Vec<String>) -> Result<()> {
    for (path, _) in sources.rust() {
        for (line, reason) in violations(sources.syntax(path)?) {
            wrong.push(format!("{}:{line}: {reason}", path.display()));
        }
    }
    Ok(())
}

fn violations(file: &File) -> Vec<(usize, String)> {
    let mut found = Found::default();
    found.modules.visit_file(file);
    found.items(&file.items);
    found.visit_file(file);
    found.violations
}

/// The names of a file's own modules.
#[derive(Default)]
struct Modules(BTreeSet<String>);

impl<'ast> Visit<'ast> for Modules {
    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        self.0.insert(module.ident.to_string());
        visit::visit_item_mod(self, module);
    }
}

#[derive(Default)]
struct Found {
    modules: Modules,
    /// Lines and reasons.
    violations: Vec<(usize, String)>,
}

impl<'ast> Visit<'ast> for Found {
    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        if let Some((_, items)) = &module.content {
            self.items(items);
        }
        visit::visit_item_mod(self, module);
    }

    fn visit_block(&mut self, block: &'ast Block) {
        self.runs(block.stmts.iter().map(|statement| match statement {
            Stmt::Item(Item::Use(import)) => Some(import),
            _ => None,
        }));
        visit::visit_block(self, block);
    }
}

impl Found {
    fn items(&mut self, items: &[Item]) {
        self.runs(items.iter().map(|item| match item {
            Item::Use(import) => Some(import),
            _ => None,
        }));
    }

    /// Checks each run of imports without anything between them.
    fn runs<'ast>(&mut self, statements: impl Iterator<Item = Option<&'ast ItemUse>>) {
        let mut seen = BTreeSet::new();
        let mut last = Group::Std;
        for statement in statements {
            // An attribute or a visibility makes an import one of its own.
            let Some(import) = statement.filter(|import| is_plain(import)) else {
                seen.clear();
                last = Group::Std;
                if let Some(import) = statement {
                    self.one_module(import);
                }
                continue;
            };
            let Some(module) = self.one_module(import) else {
                continue;
            };
            let group = self.group(&module);
            if group < last {
                self.add(import.span(), "std comes first, this crate last");
            }
            last = group;
            if !seen.insert(module.clone()) {
                let module = module.join("::");
                self.add(import.span(), format!("a second import from {module}"));
            }
        }
    }

    /// The module of which an import names items; none if there are several.
    fn one_module(&mut self, import: &ItemUse) -> Option<Vec<String>> {
        let mut module = Vec::new();
        let mut tree = &import.tree;
        loop {
            match tree {
                UseTree::Path(path) => {
                    module.push(path.ident.to_string());
                    tree = &path.tree;
                }
                UseTree::Group(group) => {
                    let is_path =
                        |tree: &UseTree| matches!(tree, UseTree::Path(_) | UseTree::Group(_));
                    if group.items.iter().any(is_path) {
                        self.add(
                            import.span(),
                            "a group with paths: one `use` for each module",
                        );
                        return None;
                    }
                    return Some(module);
                }
                // A glob stands beside the items that have other names.
                UseTree::Glob(_) => {
                    module.push("*".to_owned());
                    return Some(module);
                }
                UseTree::Name(_) | UseTree::Rename(_) => return Some(module),
            }
        }
    }

    fn add(&mut self, place: Span, reason: impl Into<String>) {
        self.violations.push((place.start().line, reason.into()));
    }

    fn group(&self, module: &[String]) -> Group {
        match module.first().map(String::as_str) {
            Some("std" | "core" | "alloc") => Group::Std,
            Some("crate" | "self" | "super") => Group::This,
            Some(name) if self.modules.0.contains(name) => Group::This,
            _ => Group::Other,
        }
    }
}

fn is_plain(import: &ItemUse) -> bool {
    import.attrs.is_empty() && matches!(import.vis, Visibility::Inherited)
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Group {
    Std,
    Other,
    This,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(source: &str) -> Vec<usize> {
        let found = violations(&syn::parse_str(source).unwrap());
        found.into_iter().map(|(line, _)| line).collect()
    }

    #[test]
    fn one_statement_a_module_in_three_groups() {
        let good = "use std::io::{self, Read};\nuse std::{env, fs};\nuse anyhow::Result;\nuse crate::a;\n\
                    pub use crate::b::{C, D};\nmod t { use std::fs; use super::*; use super::a; }";
        assert!(lines(good).is_empty(), "{:?}", lines(good));
        assert_eq!(lines("use std::{env, io::Read};"), [1]);
        assert_eq!(lines("use std::fs;\nuse std::env;"), [2]);
        assert_eq!(lines("use crate::a;\nuse std::fs;"), [2]);
        assert_eq!(lines("mod t {\n use super::*;\n use std::fs;\n}"), [3]);
        assert_eq!(lines("fn f() {\n use super::*;\n use std::fs;\n}"), [3]);
        assert_eq!(lines("pub use a::{b::C, D};"), [1]);
        assert!(lines("mod a;\nuse crate::b;\nuse a::c;").is_empty());
    }
}
